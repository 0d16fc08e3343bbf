#include "slice_shape.h"

namespace torchkv::dist {

SliceShape::SliceShape(
    const Key& key,
    const KeySpec& spec,
    int64_t num_elements,
    const Config& config) {
  if (num_elements == spec.total) {
    sizes.assign(spec.sizes.begin(), spec.sizes.end());
    cell_size = row_size(spec);
    num_cells = sizes.empty() ? 1 : sizes[0];
    return;
  }
  cell_size = dist::cell_size(
      spec, place(key, spec, config.num_servers, config.split_bytes));
  num_cells = num_elements / cell_size;
  sizes.push_back(num_cells);
  if (cell_size != 1) {
    sizes.push_back(cell_size);
  }
}

int64_t begin_of(
    const SliceId& slice,
    const KeySpec& spec,
    const Config& config) {
  const auto places =
      place(slice.key, spec, config.num_servers, config.split_bytes);
  return places.at(static_cast<size_t>(slice.index)).begin;
}

} // namespace torchkv::dist
