#pragma once

#include <ATen/ATen.h>
#include <c10/core/Event.h>
#include <c10/core/StreamGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <c10/util/Exception.h>
#include <gtest/gtest.h>

#include <exception>
#include <string>

#include "comm/nccl.h"
#include "graph.h"
#include "kernels/cuda/library.h"
#include "mock_cuda.h"
#include "nccl.h"
#include "table.h"

namespace torchkv::mock_cuda {

inline c10::Device cuda(int index) {
  return c10::Device(c10::kCUDA, static_cast<c10::DeviceIndex>(index));
}

inline c10::Stream new_stream(c10::Device device) {
  return c10::impl::VirtualGuardImpl(c10::kCUDA).getNewStream(device);
}

// Makes `waiting` wait for the work on `other`.
inline void order(c10::Stream other, c10::Stream waiting) {
  c10::Event event(c10::kCUDA);
  event.record(other);
  event.block(waiting);
}

// The checker's error for the call, or an empty string.
template <class Call>
std::string refusal(Call call) {
  try {
    call();
    check();
  } catch (const c10::Error& error) {
    return error.what_without_backtrace();
  } catch (const std::exception& error) { // TorchScript's, around it
    return error.what();
  }
  return "";
}

// The error of a call that a capture on a new stream of the device refuses; the
// capture goes on.
template <class Call>
std::string refusal_in_capture(c10::Device device, Call call) {
  const c10::Stream stream = new_stream(device);
  const c10::StreamGuard guard(stream);
  begin_capture(stream);
  std::string error = refusal(call);
  EXPECT_EQ(refusal([&] { end_capture(stream); }), "");
  return error;
}

// New devices for each test; expects all memory to be free at its end.
class DevicesTest : public ::testing::Test {
 protected:
  explicit DevicesTest(int num_devices = 4) {
    reset(num_devices);
    kernels::cuda::set_table(&table());
    nccl::set_functions(&nccl_functions());
  }
  // After the tensors of a derived class.
  ~DevicesTest() override {
    EXPECT_EQ(refusal([] { reset(0); }), "");
  }
};

} // namespace torchkv::mock_cuda
