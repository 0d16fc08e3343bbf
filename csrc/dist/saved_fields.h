#pragma once

#include "../core/row_init.h"
#include "../memory/key_state.h"
#include "bytes.h"
#include "protocol/slice.h"

namespace torchkv::dist {

// What snapshots, and the parts that ranks gather, have of a key besides bytes
// of its value.

void write_state(ByteWriter& out, const KeyState& state);
KeyState read_state(ByteReader& in);
void write_row_init(ByteWriter& out, const RowInit& init);
RowInit read_row_init(ByteReader& in);
void write_spec(ByteWriter& out, const KeySpec& spec);
KeySpec read_spec(ByteReader& in);

} // namespace torchkv::dist
