#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/Stream.h>
#include <c10/core/StreamGuard.h>
#include <c10/util/SmallVector.h>

#include <cstdint>
#include <list>
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
// Work on a slice runs on the current stream of its home device (on a logical
// place: on the place's stream), after earlier work on other streams. Tensors
// of the caller on other devices are ordered with the current streams there,
// before and after the work, as in PyTorch's copies between devices: the caller
// may write or free them right after the call. Does not block the host.
//
// While the home's stream is captured into a CUDA graph, it does not wait for
// work outside of the capture. As with PyTorch's operators, that is up to the
// caller that replays the graph.
//
// REQUIRES: the mutexes of all entries whose slices are entered, until it is
// destroyed; a slice is entered for one place only, and by no other StreamOrder
// at the time: its event is recorded at the end; sync() between use() and the
// work. Not thread-safe.
class TORCHKV_API StreamOrder {
 public:
  explicit StreamOrder(Streams& streams)
      : streams_(streams), runtime_(streams.runtime) {}
  ~StreamOrder();
  StreamOrder(const StreamOrder&) = delete;
  StreamOrder& operator=(const StreamOrder&) = delete;

  // Orders later work on `place` after the last use of `timeline`'s memory, and
  // makes the place's device and stream current until the next enter(). Returns
  // whether the last use was on another stream: then the tensors must be kept
  // until the work is done (Runtime::keep_until_done). Does nothing on the CPU.
  bool enter(const Place& place, Timeline& timeline) {
    const bool is_entered = current_ < homes_.size() &&
        homes_[current_].place == place && homes_[current_].done != nullptr &&
        homes_[current_].done == timeline.event;
    return !is_entered && enter_anew(place, &timeline);
  }
  // The same without a timeline: for CPU memory, or a place entered before.
  void enter(const Place& place) {
    enter_anew(place, nullptr);
  }

  // Work on `home`, which has been entered, may use the caller's memory on
  // `device` after the next sync(). Does nothing if either is the CPU.
  void use(const Place& home, c10::Device device) {
    const bool is_home = device == home.device && home.index < 0;
    if (!is_home && !device.is_cpu() && !home.device.is_cpu()) {
      use_other(home, device);
    }
  }

  // Makes homes wait for the callers' streams named by use() since the last
  // sync(). All at once, which takes fewer events: each caller's stream records
  // one per call, and if every home waits for every caller, one home waits for
  // all of them and the others wait for it.
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
    c10::Stream caller; // current there outside of this order
    c10::Stream stream; // of the work
    bool is_capturing;
    std::shared_ptr<RuntimeEvent> done; // recorded at the end
    c10::SmallVector<c10::Stream, 8> others; // waits are mutual
    size_t num_synced; // of the others: already waited for
  };
  // A stream, and the event by which others wait for it.
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
  std::list<Source> callers_; // which have recorded their events
  c10::OptionalDeviceGuard device_;
  // The caller's stream while a place's stream is current.
  std::optional<c10::Stream> hidden_;
  c10::OptionalStreamGuard stream_;
};

} // namespace torchkv
