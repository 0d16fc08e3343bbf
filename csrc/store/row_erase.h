#pragma once

#include "arguments.h"

namespace torchkv {

class Store;

// Forgets rows of row-sparse keys: one tensor of ids per key, as parse_row_ids
// takes them. Everything is checked before anything is forgotten. ValueError
// for a dense key.
void erase_rows(
    Store& store,
    const char* op,
    const Keys& keys,
    const Tensors& row_ids);

} // namespace torchkv
