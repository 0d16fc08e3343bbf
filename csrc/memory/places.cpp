#include "places.h"

#include <c10/util/Exception.h>

#include <algorithm>
#include <cstdlib>
#include <optional>
#include <sstream>

namespace torchkv {
namespace {

// None unless the name is a device's.
std::optional<c10::Device> parse_device(const std::string& name) {
  try {
    const c10::Device device(name);
    if (device.is_cpu()) {
      return c10::Device(c10::kCPU); // without an index, as in tensors
    }
    return device.has_index() ? device : c10::Device(device.type(), 0);
  } catch (const c10::Error&) {
    return std::nullopt;
  }
}

} // namespace

std::string Places::environment() {
  const char* const text = std::getenv("TORCHKV_PLACES");
  return text == nullptr ? "" : text;
}

Places::Places(const std::string& text) {
  if (text.empty()) {
    return;
  }
  std::istringstream names(text + ','); // so that a last comma is seen
  for (std::string name; std::getline(names, name, ',');) {
    const auto device = parse_device(name);
    TORCH_CHECK_VALUE(
        device.has_value(),
        "create: expected TORCHKV_PLACES to be a list of devices like "
        "'cuda:0,cuda:0', but got '",
        text,
        "'");
    listed_.push_back({*device, static_cast<int32_t>(listed_.size())});
  }
}

// Adds the place of the `nth` tensor of a list on `device`.
void Places::add(c10::Device device, size_t nth, List& result) const {
  Place place{device};
  size_t num_seen = 0;
  for (const auto& candidate : listed_) {
    if (candidate.device == device) {
      place = candidate;
      if (num_seen++ == nth) {
        break;
      }
    }
  }
  const bool is_memory = place.device.is_cpu() && place.index < 0;
  if (!is_memory &&
      std::find(result.begin(), result.end(), place) == result.end()) {
    result.push_back(place);
  }
}

Places::List Places::of(const Item& item) const {
  List result;
  const auto add_all = [&](const auto& tensors) {
    for (const auto& tensor : tensors) {
      const c10::Device device = tensor.device();
      const auto nth = !are_logical()
          ? 0
          : std::count_if(tensors.begin(), &tensor, [&](const auto& before) {
              return before.device() == device;
            });
      add(device, static_cast<size_t>(nth), result);
    }
  };
  add_all(item.values);
  add_all(item.outs);
  return result;
}

} // namespace torchkv
