#pragma once

#include <c10/util/SmallVector.h>

#include <cstdint>

#include "../core/export.h"
#include "protocol/config.h"
#include "protocol/round.h"

namespace torchkv::dist {

// How a server's store has a slice: a whole key with its shape; a part of one
// as cells (cell_size), each a row.
struct TORCHKV_API SliceShape {
  SliceShape(
      const Key& key,
      const KeySpec& spec,
      int64_t num_elements,
      const Config& config);
  SliceShape(const Round& round, const Config& config)
      : SliceShape(round.slice.key, *round.spec, round.num_elements, config) {}

  c10::SmallVector<int64_t, 4> sizes;
  int64_t cell_size = 1;
  int64_t num_cells = 1;
};

// Elements of the key before the slice.
TORCHKV_API int64_t
begin_of(const SliceId& slice, const KeySpec& spec, const Config& config);

} // namespace torchkv::dist
