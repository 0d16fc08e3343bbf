#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Stream.h>
#include <c10/util/ArrayRef.h>
#include <c10/util/SmallVector.h>

#include <cstdint>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "../core/export.h"
#include "../core/place.h"
#include "../device/runtime.h"
#include "item.h"

namespace torchkv {

// The places among which stored values are shared out. By default these are the
// accelerators that a call's tensors lie on.
//
// TORCHKV_PLACES="cuda:0,cuda:0,cuda:0,cuda:0" lets one device stand for
// several, for tests of the store type "device": the first tensor of a list is
// at the first place of its device, the second at the second, and so on; those
// beyond the last place are there, too. Each place works on a stream of its
// own. "cpu,cpu" is possible, too. Any thread.
class TORCHKV_API Places {
 public:
  // From the text of TORCHKV_PLACES. ValueError where it is no list of devices
  // that torch.device knows.
  Places(Runtime& runtime, const std::string& text);
  // TORCHKV_PLACES, or nothing.
  static std::string environment();

  // Whether one device stands for several.
  bool are_logical() const {
    return !listed_.empty();
  }

  // The distinct places of the tensors of an item; none where all are in CPU
  // memory.
  using List = c10::SmallVector<Place, 8>;
  List of(const Item& item) const;

  // Where work of a logical place goes on, an accelerator's.
  c10::Stream stream_of(const Place& place);

 private:
  void add(c10::Device device, size_t nth, List& result) const;

  Runtime& runtime_;
  std::vector<Place> listed_; // constant after construction
  std::mutex mutex_; // guards streams_
  std::vector<std::optional<c10::Stream>> streams_; // by Place::index
};

} // namespace torchkv
