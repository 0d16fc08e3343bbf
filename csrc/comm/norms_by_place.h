#pragma once

#include <ATen/core/Tensor.h>

#include <algorithm>
#include <utility>
#include <vector>

#include "../core/plain_dispatch.h"
#include "../device/stream_order.h"

namespace torchkv {

// Adds up squared norms where they are, so that the host waits once for each
// place.
class NormsByPlace {
 public:
  explicit NormsByPlace(StreamOrder& order) : order_(order) {}

  // A number of fp64. REQUIRES: its place is entered.
  void add(const Place& place, const at::Tensor& squared) {
    const auto sum =
        std::find_if(sums_.begin(), sums_.end(), [&](const auto& candidate) {
          return candidate.first == place;
        });
    if (sum == sums_.end()) {
      sums_.emplace_back(place, squared);
    } else {
      sum->second.add_(squared);
    }
  }
  double total() {
    double result = 0;
    for (const auto& [place, sum] : sums_) {
      order_.enter(place);
      const PlainDispatch plain;
      result += sum.item<double>();
    }
    return result;
  }

 private:
  StreamOrder& order_;
  std::vector<std::pair<Place, at::Tensor>> sums_;
};

} // namespace torchkv
