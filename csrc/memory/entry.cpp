#include "entry.h"

namespace torchkv {

void Slice::keep(StreamOrder& order, const Place& place) const {
  const c10::Stream stream = order.stream(place);
  const auto keep = [&](const at::Tensor& tensor) {
    if (tensor.defined()) {
      order.runtime().keep_until_done(tensor, stream);
    }
  };
  keep(value);
  keep(merge_buffer);
  keep(master);
  keep(accumulated);
  for (const auto& state : states) {
    keep(state);
  }
}

} // namespace torchkv
