#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/Stream.h>
#include <c10/core/StreamGuard.h>
#include <c10/util/SmallVector.h>

#include <cstdint>
#include <deque>
#include <memory>
#include <mutex>
#include <optional>
#include <vector>

#include "../core/export.h"
#include "../core/place.h"
#include "runtime.h"
#include "streams.h"

namespace torchkv {

// Orders one call's work on accelerators with all other work on the same
// memory, and makes the right device the current one.
//
// A slice is worked on on the current stream of its home or, where that is one
// of several places of a device, on the place's own. Where its last work was on
// another stream, that stream is waited for. Tensors of the caller on other
// devices are ordered with the current streams there, before the work and after
// it, as PyTorch's own copies between devices do: the caller may write or free
// them right after the call. The host waits for nothing.
//
// While the home's stream is captured into a CUDA graph, nothing outside of the
// capture is waited for: that is up to who replays the graph, as with PyTorch's
// operators.
//
// REQUIRES: the mutexes of all entries whose slices are entered, until it is
// destroyed; a slice is entered for one place only, and by no other StreamOrder
// of that time: its event is recorded at the end; sync() between use() and the
// work that is meant. One thread.
class TORCHKV_API StreamOrder {
 public:
  explicit StreamOrder(Streams& streams)
      : streams_(streams), runtime_(streams.runtime) {}
  ~StreamOrder();
  StreamOrder(const StreamOrder&) = delete;
  StreamOrder& operator=(const StreamOrder&) = delete;
  StreamOrder(StreamOrder&&) = delete;
  StreamOrder& operator=(StreamOrder&&) = delete;

  // Work enqueued on `place` from now on may touch the memory of `timeline`.
  // The place's device and stream are the current ones until the next enter().
  // Returns whether the memory was last used on another stream, so that its
  // tensors must be kept until that of the place is done (Runtime). Nothing to
  // do on the CPU, where work is done when a call returns.
  bool enter(const Place& place, Timeline& timeline) {
    const bool is_entered = current_ < homes_.size() &&
        homes_[current_].place == place && homes_[current_].done != nullptr &&
        homes_[current_].done == timeline.event;
    return !is_entered && enter_anew(place, &timeline);
  }
  // The same for memory without a timeline, in CPU memory, or for a place that
  // was entered before.
  void enter(const Place& place) {
    enter_anew(place, nullptr);
  }

  // Work of `home`, which has been entered, may touch memory of a caller on
  // `device` after the next sync(). Nothing to do where one of them is the CPU.
  void use(const Place& home, c10::Device device) {
    const bool is_home = device == home.device && home.index < 0;
    if (!is_home && !device.is_cpu() && !home.device.is_cpu()) {
      use_other(home, device);
    }
  }

  // Lets homes wait for the callers' streams that use() has named since the
  // last sync(). All of them at once, because that takes fewer events: each
  // stream of a caller records one in a call, and where every home waits for
  // every caller, one of the homes waits first and the others wait for it.
  void sync();

  Runtime& runtime() const {
    return runtime_;
  }
  // The stream of the work on `home`, which has been entered, and whether it is
  // captured into a CUDA graph.
  c10::Stream stream(const Place& home) {
    return home_of(home).stream;
  }
  bool is_capturing(const Place& home) {
    return home_of(home).is_capturing;
  }

 private:
  struct Home {
    Place place;
    c10::Stream caller; // the current one there, but for this order
    c10::Stream stream; // of the work
    bool is_capturing;
    std::shared_ptr<RuntimeEvent> done; // recorded at the end
    c10::SmallVector<c10::Stream, 8> others; // which it waits for, and they for
    size_t num_synced; // of the others, it waits for so many already
  };
  // A stream, and what others wait for that wait for it.
  struct Source {
    c10::Stream stream;
    std::shared_ptr<RuntimeEvent> event;
  };
  struct Wait {
    const Source* source;
    c10::Stream stream; // which waits
  };
  bool enter_anew(const Place& place, Timeline* timeline);
  Home& home_of(const Place& place);
  c10::Stream stream_of_caller(c10::Device device);
  void use_other(const Place& place, c10::Device device);
  const Source& source_of(c10::Stream caller);
  void wait_all(c10::ArrayRef<Wait> waits);
  void make_current(const Home& home);
  void show_callers_stream();
  void end();

  Streams& streams_;
  Runtime& runtime_;
  c10::SmallVector<Home, 1> homes_;
  size_t current_ = SIZE_MAX; // the home whose device and stream are current
  std::deque<Source> callers_; // which have recorded their events
  c10::OptionalDeviceGuard device_;
  // While a place's own stream is the current one: the caller's there.
  std::optional<c10::Stream> hidden_;
  c10::OptionalStreamGuard stream_;
};

} // namespace torchkv
