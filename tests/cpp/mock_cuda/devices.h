#pragma once

#include <c10/core/Device.h>
#include <c10/core/Stream.h>

#include <cstdint>
#include <memory>
#include <mutex>
#include <string>

#include "clock.h"
#include "history.h"

// Fake CUDA devices for the CPU build of torch: current device, streams, events
// and peer access, registered as c10's guard of DeviceType::CUDA. Work is
// executed at once; vector clocks record its order.
//
// All host threads are one actor: what one of them has waited for, all have.
namespace torchkv::mock_cuda {

class Capture; // graph.h

// Which pairs of devices can reach each other's memory.
enum class Topology : uint8_t { kAll, kPairs /* 0-1, 2-3, ... */, kNone };

// What has happened since the last reset.
struct Counters {
  int64_t allocations = 0;
  int64_t operators = 0; // of ATen, copies included
  int64_t launches = 0; // of kernels by launch()
  int64_t records = 0; // of events
  int64_t waits = 0; // of streams, for events
  int64_t synchronizations = 0; // of the host
};

// Held during a work and its checks; guards all state of the mock.
std::recursive_mutex& mutex();

// Fresh devices, with no peer access enabled. The calling thread's current
// device is cuda:0, its current streams are the default ones. REQUIRES: no
// device memory in use, no event alive, no stream captured.
void reset_devices(int num_devices, Topology topology);

Counters& counters();

// After so many allocations, each is an OutOfMemoryError; negative: none is.
int64_t& allocations_left();

// Throws c10::Error for the first error that could not be thrown where it
// occurred: in a free, or on the host. Every access of a device does so, too.
void check();

// The calling thread's.
c10::Device current_device();
c10::Stream current_stream(c10::Device device);

// Enables access of `device`'s kernels to `peer`'s memory. Returns whether the
// topology allows it.
bool enable_peer_access(c10::DeviceIndex device, c10::DeviceIndex peer);
bool has_any_peer_access(); // of any pair

// Whether kernels were compiled for the device; true unless a test changes it.
bool has_code(c10::DeviceIndex device);
void set_has_code(c10::DeviceIndex device, bool has);

// REQUIRES for all below: mutex().

// For the next check().
void note_mistake(std::string text);

// Some calls of CUDA and of c10's guard switch to a device and back by a
// function that creates a context on the thread's current device: a mistake if
// there is none.
void check_context(c10::DeviceIndex device);

// The next work on the stream: after the stream's work, and what the host has
// waited for.
WorkPtr enqueue(c10::Stream stream, std::string name);
const Clock& clock_of(c10::Stream stream);
// The clock of an event recorded on the stream now.
Clock now_of(c10::Stream stream);
// Orders later work on the stream after `time`.
void wait_for(c10::Stream stream, const Clock& time);
// Null if the stream is not captured.
std::shared_ptr<Capture>& capture_of(c10::Stream stream);
// A stream that no other caller gets.
c10::Stream private_stream(c10::Device device);
// The current clock of the host.
WorkPtr host_work(std::string name);
const Clock& host_clock();
// Blocks the host until the stream is done.
void synchronize(c10::Stream stream);
// The stream of a cudaStream_t: null is the current device's default stream.
c10::Stream stream_of(void* native_handle);
std::string place_of(c10::Stream stream); // "stream 3 of cuda:1"

// Whether kernels of `device` may use memory of `peer` now.
bool has_peer_access(c10::DeviceIndex device, c10::DeviceIndex peer);

} // namespace torchkv::mock_cuda
