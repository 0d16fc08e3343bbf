#include "receive.h"

#include <algorithm>
#include <cstdint>
#include <vector>

#include "../core/compressed.h"
#include "../core/errors.h"
#include "../kernels/cuda/code_chunk.h"
#include "../kernels/cuda/library.h"
#include "../memory/layout.h"
#include "cuda_dtype.h"

namespace torchkv {
namespace {

using kernels::cuda::is_aligned;
using kernels::cuda::kSendChunk;

const DeviceCodes* codes_of(const Value& value) {
  return dynamic_cast<const DeviceCodes*>(value.encoding);
}

// The codes of the chunks that have the elements from value.begin on.
at::Tensor codes_of_part(
    const Value& value,
    const DeviceCodes& codes,
    int64_t num_elements) {
  const int64_t bytes = kernels::cuda::bytes_of_chunk(
      codes.codec.id, static_cast<int64_t>(c10::elementSize(codes.dtype)));
  const int64_t first = value.begin / kSendChunk;
  const int64_t end =
      (value.begin + num_elements + kSendChunk - 1) / kSendChunk;
  return part_of(*value.data, first * bytes, end * bytes);
}

} // namespace

bool is_received(const Job& job) {
  const c10::Device home = job.slice->home.device;
  return home.is_cuda() && kernels::cuda::has_kernels(home) &&
      std::all_of(
             job.values.begin(), job.values.end(), [&](const Value& value) {
               return codes_of(value) != nullptr
                   ? value.dtype() == job.accumulation
                   : value.dense() != nullptr;
             });
}

at::Tensor receive(StreamOrder& order, const Job& job) {
  Runtime& runtime = order.runtime();
  const Place& home = job.slice->home;
  const int64_t num_elements = job.result->numel();
  for (const auto& value : job.values) {
    order.use(home, value.device());
  }
  order.sync();
  kernels::cuda::Receive call{};
  const auto number = cuda_dtype(job.accumulation);
  TORCHKV_INTERNAL_ASSERT(number.has_value());
  call.number = *number;
  call.num_elements = num_elements;
  // What is read is in memory of the home until the launch.
  std::vector<at::Tensor> moved;
  at::Tensor sum = runtime.allocate_like(*job.result, job.accumulation);
  call.sum = sum.mutable_data_ptr();
  const auto launch = [&] {
    call.is_aligned =
        call.first % kernels::cuda::kSendPack == 0 && is_aligned(call.sum);
    for (uint32_t k = 0; k < call.num_values; ++k) {
      const auto& value = call.values[k];
      call.is_aligned = call.is_aligned && is_aligned(value.memory);
    }
    kernels::cuda::check(
        kernels::cuda::table()->launch_receive(
            call, order.stream(home).native_handle()));
    moved.clear();
    call.adds = true;
    call.num_values = 0;
  };
  for (const auto& value : job.values) { // whose codec is the same
    if (const auto* const codes = codes_of(value)) {
      call.codec = codes->codec.id;
      call.threshold = codes->codec.threshold;
      call.first = value.begin % kSendChunk;
    }
  }
  for (const auto& value : job.values) {
    if (call.num_values == kernels::cuda::kMaxSent) {
      launch();
    }
    auto& received = call.values[call.num_values++];
    if (const auto* const codes = codes_of(value)) {
      const at::Tensor part = codes_of_part(value, *codes, num_elements);
      at::Tensor& own = moved.emplace_back(part);
      if (part.device() != home.device) {
        own = runtime.allocate({part.numel()}, {1}, c10::kByte, home.device);
        runtime.copy(own, part);
      }
      received = {own.const_data_ptr(), /*is_dense=*/false};
      continue;
    }
    const at::Tensor& dense = *value.data;
    at::Tensor& own = moved.emplace_back(dense);
    const bool is_read = dense.device() == home.device &&
        dense.scalar_type() == job.accumulation && is_plain(dense) &&
        same_layout(dense, *job.result);
    if (!is_read) {
      own = runtime.allocate_like(*job.result, job.accumulation);
      runtime.copy(own, dense);
    }
    received = {own.const_data_ptr(), /*is_dense=*/true};
  }
  launch();
  return sum;
}

} // namespace torchkv
