#pragma once

#include <c10/core/Device.h>
#include <c10/core/Stream.h>

#include <memory>
#include <mutex>
#include <utility>
#include <vector>

#include "../core/export.h"
#include "../core/place.h"
#include "runtime.h"

namespace torchkv {

// A store's own streams, and its events. Any thread. The runtime outlives it.
class TORCHKV_API Streams {
 public:
  explicit Streams(Runtime& runtime_)
      : runtime(runtime_), events_(std::make_shared<Events>(runtime_)) {}

  // The store's stream of a place on an accelerator, created on first use. That
  // of a device itself (index -1) is for asynchronous calls, that of a logical
  // place for all its work.
  c10::Stream of(const Place& place);

  // An event for streams of `device`. Returns to the pool with its last owner:
  // creating one takes as long as recording it.
  std::shared_ptr<RuntimeEvent> event(c10::Device device);

  Runtime& runtime;

 private:
  struct Events {
    explicit Events(Runtime& runtime_) : runtime(runtime_) {}
    Runtime& runtime;
    std::mutex mutex; // guards the rest
    // By index of the device.
    std::vector<std::vector<std::unique_ptr<RuntimeEvent>>> free;
  };
  const std::shared_ptr<Events> events_; // kept alive by events in use
  std::mutex mutex_; // guards streams_
  std::vector<std::pair<Place, c10::Stream>> streams_;
};

} // namespace torchkv
