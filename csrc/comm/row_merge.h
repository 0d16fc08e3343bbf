#pragma once

#include <c10/util/ArrayRef.h>

#include <optional>

#include "row_sources.h"

namespace torchkv {

// The sources of all rows that values on `home` have, merged there by PyTorch's
// operators; nothing if there is no row, if the ids of a value are on the host
// only, if it is on another device or of another dtype, if the piece is only
// part of a value, or if there are more than 2^31 - 1 ids. The host waits for
// the number of rows. REQUIRES: PlainDispatch; as row_sources_of.
std::optional<RowSources> merge_on_device(
    Runtime& runtime,
    const Place& home,
    c10::ArrayRef<Value> values,
    const RowPiece& piece,
    c10::ScalarType dtype);

} // namespace torchkv
