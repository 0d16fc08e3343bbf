#include "devices.h"

#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <c10/util/Exception.h>

#include <map>
#include <set>
#include <utility>

#include "graph.h"
#include "memory.h"

namespace torchkv::mock_cuda {
namespace {

// As c10::cuda has them: pool streams are handed out in turn.
constexpr int kStreamsPerPool = 32;

struct StreamState {
  c10::Stream stream;
  Actor actor;
  Clock clock;
  std::shared_ptr<Capture> capture;
};

struct Event {
  c10::DeviceIndex device;
  Clock clock;
  Capture::Point captured; // instead, where it was recorded in a capture
};

struct Devices {
  int num_devices = 0;
  Topology topology = Topology::kAll;
  Counters counters;
  int64_t allocations_left = -1;
  Clock host;
  Actor last_actor = kHost;
  std::map<std::pair<c10::DeviceIndex, c10::StreamId>, StreamState> streams;
  // Of each device, of low and of high priority.
  std::map<std::pair<c10::DeviceIndex, bool>, int> next_of_pool;
  std::set<std::pair<c10::DeviceIndex, c10::DeviceIndex>> peers;
  std::set<c10::DeviceIndex> without_code;
  std::set<c10::DeviceIndex> contexts; // devices with a context
  int num_private_streams = 0;
  int64_t num_events = 0;
  std::string mistake;
};

Devices& devices() {
  static auto* devices = new Devices(); // used by static destructors
  return *devices;
}

thread_local c10::DeviceIndex thread_device = 0;
thread_local std::map<c10::DeviceIndex, c10::StreamId> thread_streams;

void check_device(c10::Device device) {
  TORCH_CHECK(
      device.is_cuda() && device.index() >= 0 &&
          device.index() < devices().num_devices,
      "mock_cuda: expected one of ",
      devices().num_devices,
      " devices, but got ",
      device);
}

StreamState& state_of(c10::Stream stream) {
  check_device(stream.device());
  auto& streams = devices().streams;
  const auto key = std::make_pair(stream.device_index(), stream.id());
  auto it = streams.find(key);
  if (it == streams.end()) {
    it = streams
             .emplace(
                 key, StreamState{stream, ++devices().last_actor, {}, nullptr})
             .first;
  }
  return it->second;
}

// For the host: an event recorded in a capture is invalid.
const Clock& clock_of(const char* call, void* event) {
  check_not_capturing(call);
  TORCH_CHECK(
      static_cast<Event*>(event)->captured.capture == nullptr,
      "mock_cuda: ",
      call,
      " of an event of a capture");
  return static_cast<Event*>(event)->clock;
}

class GuardImpl final : public c10::impl::DeviceGuardImplInterface {
 public:
  c10::DeviceType type() const override {
    return c10::kCUDA;
  }
  c10::Device exchangeDevice(c10::Device device) const override {
    const c10::Device before = getDevice();
    setDevice(device);
    return before;
  }
  c10::Device getDevice() const override {
    return current_device();
  }
  void setDevice(c10::Device device) const override {
    check_device(device);
    if (thread_device == device.index()) {
      return; // as c10's: it makes no context
    }
    const std::lock_guard lock(mutex());
    devices().contexts.insert(device.index());
    thread_device = device.index();
  }
  void uncheckedSetDevice(c10::Device device) const noexcept override {
    thread_device = device.index();
  }
  c10::DeviceIndex deviceCount() const noexcept override {
    return static_cast<c10::DeviceIndex>(devices().num_devices);
  }

  c10::Stream getStream(c10::Device device) const override {
    return current_stream(device);
  }
  c10::Stream getDefaultStream(c10::Device device) const override {
    return c10::Stream(c10::Stream::DEFAULT, device);
  }
  c10::Stream getStreamFromGlobalPool(c10::Device device, bool is_high_priority)
      const override {
    const std::lock_guard lock(mutex());
    int& next = devices().next_of_pool[{device.index(), is_high_priority}];
    const int id = 1 + next + (is_high_priority ? kStreamsPerPool : 0);
    next = (next + 1) % kStreamsPerPool;
    return c10::Stream(c10::Stream::UNSAFE, device, id);
  }
  c10::Stream getNewStream(c10::Device device, int priority) const override {
    return getStreamFromGlobalPool(device, priority < 0);
  }
  c10::Stream exchangeStream(c10::Stream stream) const override {
    const c10::Stream before = getStream(stream.device());
    thread_streams[stream.device_index()] = stream.id();
    return before;
  }
  void* getStreamNativeHandle(const c10::Stream stream) const override {
    const std::lock_guard lock(mutex());
    return stream.id() == 0 ? nullptr : &state_of(stream);
  }

  void record(
      void** event,
      const c10::Stream& stream,
      const c10::DeviceIndex device,
      const c10::EventFlag /*flag*/) const override {
    const std::lock_guard lock(mutex());
    TORCH_CHECK(
        device == -1 || device == stream.device_index(),
        "mock_cuda: an event of cuda:",
        device,
        " was recorded on a stream of ",
        stream.device());
    check_context(stream.device_index());
    StreamState& state = state_of(stream);
    if (*event == nullptr) {
      *event = new Event();
      ++devices().num_events;
    }
    auto& recorded = *static_cast<Event*>(*event);
    if (state.capture != nullptr) {
      recorded = {stream.device_index(), {}, Capture::record(stream)};
    } else {
      recorded = {stream.device_index(), now_of(stream), {}};
    }
    ++devices().counters.records;
  }
  void block(void* event, const c10::Stream& stream) const override {
    const std::lock_guard lock(mutex());
    check_context(stream.device_index());
    const auto& recorded = *static_cast<Event*>(event);
    if (recorded.captured.capture != nullptr || capture_of(stream) != nullptr) {
      Capture::wait(stream, recorded.captured);
    } else {
      wait_for(stream, recorded.clock);
    }
    ++devices().counters.waits;
  }
  void destroyEvent(void* event, const c10::DeviceIndex device)
      const noexcept override {
    const std::lock_guard lock(mutex());
    check_context(device);
    delete static_cast<Event*>(event);
    --devices().num_events;
  }

  // Work not known to be done by the host counts as pending.
  bool queryEvent(void* event) const override {
    const std::lock_guard lock(mutex());
    return devices().host.covers(clock_of("cudaEventQuery", event));
  }
  bool queryStream(const c10::Stream& stream) const override {
    const std::lock_guard lock(mutex());
    check_not_capturing("cudaStreamQuery");
    return devices().host.covers(state_of(stream).clock);
  }
  void synchronizeEvent(void* event) const override {
    const std::lock_guard lock(mutex());
    devices().host.join(clock_of("cudaEventSynchronize", event));
    ++devices().counters.synchronizations;
  }
  void synchronizeStream(const c10::Stream& stream) const override {
    const std::lock_guard lock(mutex());
    synchronize(stream);
  }
  void synchronizeDevice(const c10::DeviceIndex device) const override {
    const std::lock_guard lock(mutex());
    check_not_capturing("cudaDeviceSynchronize");
    for (const auto& [key, state] : devices().streams) {
      if (key.first == device) {
        devices().host.join(state.clock);
      }
    }
    ++devices().counters.synchronizations;
  }
  void recordDataPtrOnStream(
      const c10::DataPtr& data,
      const c10::Stream& stream) const override {
    keep_until_done(data.get(), stream);
  }
};

C10_REGISTER_GUARD_IMPL(CUDA, GuardImpl)

} // namespace

std::recursive_mutex& mutex() {
  static auto* mutex = new std::recursive_mutex(); // as devices()
  return *mutex;
}

void reset_devices(int num_devices, Topology topology) {
  check_not_capturing("a reset");
  TORCH_CHECK(
      devices().num_events == 0,
      "mock_cuda: unexpected events from before the reset: ",
      devices().num_events);
  devices() = Devices();
  devices().num_devices = num_devices;
  devices().topology = topology;
  thread_device = 0;
  thread_streams.clear();
}

Counters& counters() {
  return devices().counters;
}

int64_t& allocations_left() {
  return devices().allocations_left;
}

void check() {
  const std::lock_guard lock(mutex());
  const std::string text = std::exchange(devices().mistake, {});
  TORCH_CHECK(text.empty(), text);
}

void note_mistake(std::string text) {
  if (devices().mistake.empty()) {
    devices().mistake = std::move(text);
  }
}

WorkPtr enqueue(c10::Stream stream, std::string name) {
  StreamState& state = state_of(stream);
  devices().contexts.insert(stream.device_index());
  TORCH_CHECK(
      state.capture == nullptr,
      "mock_cuda: ",
      name,
      " in a capture is not modelled");
  state.clock.join(devices().host);
  return std::make_shared<Work>(Work{
      std::move(name),
      place_of(stream),
      state.actor,
      state.clock.tick(state.actor)});
}

const Clock& clock_of(c10::Stream stream) {
  return state_of(stream).clock;
}

Clock now_of(c10::Stream stream) {
  StreamState& state = state_of(stream);
  state.clock.join(devices().host);
  return state.clock;
}

void wait_for(c10::Stream stream, const Clock& time) {
  state_of(stream).clock.join(time);
}

std::shared_ptr<Capture>& capture_of(c10::Stream stream) {
  return state_of(stream).capture;
}

c10::Stream private_stream(c10::Device device) {
  const int id = 2 * kStreamsPerPool + ++devices().num_private_streams;
  return c10::Stream(c10::Stream::UNSAFE, device, id);
}

WorkPtr host_work(std::string name) {
  return std::make_shared<Work>(
      Work{std::move(name), "the host", kHost, devices().host.tick(kHost)});
}

const Clock& host_clock() {
  return devices().host;
}

void check_context(c10::DeviceIndex device) {
  if (device != thread_device && devices().contexts.count(thread_device) == 0) {
    note_mistake(
        c10::str(
            "mock_cuda: a call for cuda:",
            int{device},
            " makes a context on cuda:",
            int{thread_device},
            ", which had none"));
  }
  devices().contexts.insert(device);
}

void synchronize(c10::Stream stream) {
  check_not_capturing("cudaStreamSynchronize");
  devices().host.join(state_of(stream).clock);
  ++devices().counters.synchronizations;
}

c10::Stream stream_of(void* native_handle) {
  return native_handle == nullptr
      ? c10::Stream(c10::Stream::DEFAULT, current_device())
      : static_cast<StreamState*>(native_handle)->stream;
}

std::string place_of(c10::Stream stream) {
  return c10::str("stream ", stream.id(), " of ", stream.device());
}

bool has_peer_access(c10::DeviceIndex device, c10::DeviceIndex peer) {
  return device == peer || devices().peers.count({device, peer}) != 0;
}

bool enable_peer_access(c10::DeviceIndex device, c10::DeviceIndex peer) {
  const std::lock_guard lock(mutex());
  check_device(c10::Device(c10::kCUDA, device));
  check_device(c10::Device(c10::kCUDA, peer));
  const Topology topology = devices().topology;
  const bool can = topology == Topology::kAll ||
      (topology == Topology::kPairs && device / 2 == peer / 2);
  if (can && device != peer) {
    devices().peers.emplace(device, peer);
  }
  return can || device == peer;
}

bool has_any_peer_access() {
  const std::lock_guard lock(mutex());
  return !devices().peers.empty();
}

bool has_code(c10::DeviceIndex device) {
  const std::lock_guard lock(mutex());
  return devices().without_code.count(device) == 0;
}

void set_has_code(c10::DeviceIndex device, bool has) {
  const std::lock_guard lock(mutex());
  if (has) {
    devices().without_code.erase(device);
  } else {
    devices().without_code.insert(device);
  }
}

c10::Device current_device() {
  return c10::Device(c10::kCUDA, thread_device);
}

c10::Stream current_stream(c10::Device device) {
  const c10::Device indexed = device.has_index() ? device : current_device();
  const auto it = thread_streams.find(indexed.index());
  return c10::Stream(
      c10::Stream::UNSAFE,
      indexed,
      it == thread_streams.end() ? 0 : it->second);
}
} // namespace torchkv::mock_cuda
