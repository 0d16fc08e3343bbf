#include "streams.h"

#include <algorithm>

namespace torchkv {

c10::Stream Streams::of(const Place& place) {
  const std::lock_guard lock(mutex_);
  for (const auto& [known, stream] : streams_) {
    if (known == place) {
      return stream;
    }
  }
  streams_.emplace_back(place, runtime.new_stream(place.device));
  return streams_.back().second;
}

std::shared_ptr<RuntimeEvent> Streams::event(c10::Device device) {
  const auto index = static_cast<size_t>(std::max<int>(device.index(), 0));
  std::unique_ptr<RuntimeEvent> event;
  {
    const std::lock_guard lock(events_->mutex);
    auto& free = events_->free;
    if (free.size() <= index) {
      free.resize(index + 1);
    }
    if (!free[index].empty()) {
      event = std::move(free[index].back());
      free[index].pop_back();
    }
  }
  if (event == nullptr) {
    event = runtime.make_event(device);
  }
  return {event.release(), [events = events_, index](RuntimeEvent* done) {
            std::unique_ptr<RuntimeEvent> owned(done);
            const std::lock_guard lock(events->mutex);
            events->free[index].push_back(std::move(owned));
          }};
}

} // namespace torchkv
