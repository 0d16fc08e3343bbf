#include "table.h"

#include <c10/util/Exception.h>

#include <algorithm>
#include <functional>
#include <memory>
#include <mutex>
#include <vector>

#include "emulated_table.h"
#include "graph.h"
#include "host_memory.h"
#include "kernels/cuda/code_chunk.h"
#include "mock_cuda.h"

namespace torchkv::mock_cuda {
namespace {

using namespace kernels::cuda; // NOLINT: all of it

constexpr int kErrorPeerAccessUnsupported = 217;
constexpr int kErrorHostMemoryAlreadyRegistered = 712;
constexpr int kErrorHostMemoryNotRegistered = 713;

size_t bytes_of(Dtype dtype) {
  switch (dtype) {
    case Dtype::kBool:
    case Dtype::kInt8:
      return 1;
    case Dtype::kHalf:
    case Dtype::kBFloat16:
    case Dtype::kInt16:
      return 2;
    case Dtype::kFloat:
    case Dtype::kInt32:
      return 4;
    case Dtype::kDouble:
    case Dtype::kInt64:
      return 8;
  }
  TORCH_CHECK(false, "mock_cuda: a launch of no dtype");
}

size_t bytes_of_sum(Dtype dtype) {
  return is_half(dtype) ? 4 : bytes_of(dtype);
}

// The ranges that the keys of a launch touch: `range_of` returns that of each
// of `num_pointers` pointers.
template <class RangeOf>
std::vector<Range> ranges_of(const void* params, RangeOf range_of) {
  const auto& small = *static_cast<const Params<kSmallParams>*>(params);
  const size_t num_pointers =
      (small.head.key_bytes - sizeof(KeyHead)) / sizeof(void*);
  std::vector<Range> ranges;
  for (uint32_t i = 0; i < small.head.num_keys; ++i) {
    const auto& key = *reinterpret_cast<const KeyHead*>(
        small.bank + i * small.head.key_bytes);
    const auto* pointers = reinterpret_cast<void* const*>(&key + 1);
    for (size_t place = 0; place < num_pointers; ++place) {
      if (pointers[place] != nullptr) {
        ranges.push_back(range_of(key, pointers[place], place, num_pointers));
      }
    }
  }
  return ranges;
}

void add_memory(
    std::vector<Range>& ranges,
    const void* params,
    size_t bytes_per_unit,
    bool is_write) {
  const auto& small = *static_cast<const Params<kSmallParams>*>(params);
  for (uint32_t i = 0; i < small.head.num_keys; ++i) {
    const auto& key = *reinterpret_cast<const KeyHead*>(
        small.bank + i * small.head.key_bytes);
    ranges.push_back(
        {key.memory, static_cast<size_t>(key.size) * bytes_per_unit, is_write});
  }
}

// A double for each chunk of each key.
void add_squares(std::vector<Range>& ranges, const void* params) {
  const auto& small = *static_cast<const Params<kSmallParams>*>(params);
  uint32_t first = 0;
  for (uint32_t i = 0; i < small.head.num_keys; ++i) {
    const auto& key = *reinterpret_cast<const KeyHead*>(
        small.bank + i * small.head.key_bytes);
    ranges.push_back(
        {key.memory, (key.chunk_end - first) * sizeof(double), true});
    first = key.chunk_end;
  }
}

// `run` gets a copy of the parameters, as a kernel does.
int launch_with(
    const char* kernel,
    const Launch& call,
    const std::vector<Range>& ranges,
    const std::function<int(const Launch&)>& run) {
  const auto* bytes = static_cast<const char*>(call.params);
  const auto error = std::make_shared<int>(0);
  launch(
      kernel,
      call.stream,
      ranges,
      [run,
       error,
       call,
       copy = std::vector<char>(bytes, bytes + call.params_bytes)] {
        *error = run({copy.data(), call.params_bytes, call.stream});
      });
  return *error;
}

// PyTorch refuses larger parameters while it captures.
void check_params(const Launch& call) {
  const std::lock_guard lock(mutex());
  TORCH_CHECK(
      call.params_bytes == kSmallParams ||
          capture_of(stream_of(call.stream)) == nullptr,
      "mock_cuda: a launch with ",
      call.params_bytes,
      " bytes of parameters in a capture");
}

void check_code() {
  TORCH_CHECK(
      has_code(current_device().index()),
      "mock_cuda: a launch on ",
      current_device(),
      ", for which there is no code");
}

// What the first launch of a rule with norms writes, and the last one reads.
Range numbers_of(Rule rule, const KeyHead& key, const void* begin) {
  if (rule == Rule::kScaled) {
    return {begin, sizeof(double), false};
  }
  const int64_t num_chunks = (key.size + kNormChunk - 1) / kNormChunk;
  return {begin, static_cast<size_t>(num_chunks) * sizeof(Squares), true};
}

int launch_sum(Variant variant, Launch call) {
  check_params(call);
  check_code();
  const void* const params = call.params;
  const auto& head = *static_cast<const ParamsHead*>(params);
  auto ranges = ranges_of(
      params,
      [&](const KeyHead& key, const void* begin, size_t place, size_t all) {
        const size_t num_own = all - head.num_values;
        if (has_numbers(variant.rule) && place + 1 == num_own) {
          return numbers_of(variant.rule, key, begin);
        }
        const bool is_own = place < num_own; // the master, a state
        const bool is_sum = head.first_is_sum && place == num_own;
        const size_t bytes = is_own ? bytes_of_sum(variant.stored)
            : is_sum                ? bytes_of_sum(variant.value)
                                    : bytes_of(variant.value);
        return Range{begin, static_cast<size_t>(key.size) * bytes, is_own};
      });
  if (variant.rule == Rule::kNorm) {
    add_squares(ranges, params);
  } else {
    add_memory(ranges, params, bytes_of(variant.stored), /*is_write=*/true);
  }
  return launch_with(
      variant.rule == Rule::kNorm ? "norm" : "sum",
      call,
      ranges,
      [=](const Launch& copy) {
        return testing::emulated_table().launch_sum(variant, copy);
      });
}

int launch_rates(Launch call) {
  check_params(call);
  check_code();
  std::vector<Range> rates;
  auto ranges = ranges_of(
      call.params, [&](const KeyHead& key, const void* begin, size_t, size_t) {
        rates.push_back({key.memory, sizeof(double), true});
        const size_t bytes = static_cast<size_t>(key.size) * sizeof(Squares);
        return Range{begin, bytes, false};
      });
  ranges.insert(ranges.end(), rates.begin(), rates.end());
  return launch_with("rates", call, ranges, [](const Launch& copy) {
    return testing::emulated_table().launch_rates(copy);
  });
}

int launch_copy(Launch call) {
  check_params(call);
  check_code();
  auto ranges = ranges_of(
      call.params, [&](const KeyHead& key, const void* begin, size_t, size_t) {
        return Range{begin, static_cast<size_t>(key.size), /*is_write=*/true};
      });
  add_memory(ranges, call.params, 1, /*is_write=*/false);
  return launch_with("copy", call, ranges, [](const Launch& copy) {
    return testing::emulated_table().launch_copy(copy);
  });
}

int launch_select_top(SelectTop call, void* stream) {
  check_code();
  const auto count = static_cast<size_t>(call.num_elements);
  std::vector<Range> ranges;
  std::for_each_n(call.values, call.num_values, [&](const TopValue& value) {
    ranges.push_back({value.values, count * bytes_of(call.value), false});
    ranges.push_back({value.residual, count * bytes_of_sum(call.value), false});
    ranges.push_back({value.state, sizeof(TopState), true});
  });
  const auto error = std::make_shared<int>(0);
  launch("select_top", stream, ranges, [=] {
    *error = testing::emulated_table().launch_select_top(call, stream);
  });
  return *error;
}

int launch_send(Send send, void* stream) {
  check_code();
  const auto count = static_cast<size_t>(send.num_elements);
  const size_t bytes = count * bytes_of_sum(send.value);
  const auto bytes_of_codes = static_cast<size_t>(kernels::cuda::bytes_of_codes(
      send.codec,
      static_cast<int64_t>(bytes_of_sum(send.value)),
      send.num_elements));
  std::vector<Range> ranges;
  if (!send.packs) {
    ranges.push_back({send.sum, bytes, true});
  }
  std::for_each_n(send.values, send.num_values, [&](const SentValue& value) {
    ranges.push_back({value.values, count * bytes_of(send.value), false});
    if (value.residual != nullptr) {
      ranges.push_back({value.residual, bytes, false});
      ranges.push_back({value.kept, bytes, true});
    }
    if (send.packs) {
      ranges.push_back({value.codes, bytes_of_codes, true});
    }
    if (value.top != nullptr) {
      ranges.push_back({value.top, sizeof(TopState), false});
    }
  });
  const auto error = std::make_shared<int>(0);
  launch("send", stream, ranges, [=] {
    *error = testing::emulated_table().launch_send(send, stream);
  });
  return *error;
}

int launch_receive(Receive call, void* stream) {
  check_code();
  const size_t size = bytes_of(call.number);
  const size_t bytes = static_cast<size_t>(call.num_elements) * size;
  const auto bytes_of_codes = static_cast<size_t>(kernels::cuda::bytes_of_codes(
      call.codec, static_cast<int64_t>(size), call.first + call.num_elements));
  std::vector<Range> ranges{{call.sum, bytes, true}};
  std::for_each_n(
      call.values, call.num_values, [&](const ReceivedValue& value) {
        ranges.push_back(
            {value.memory, value.is_dense ? bytes : bytes_of_codes, false});
      });
  const auto error = std::make_shared<int>(0);
  launch("receive", stream, ranges, [=] {
    *error = testing::emulated_table().launch_receive(call, stream);
  });
  return *error;
}

// What sums of rows read.
std::vector<Range> sources_of(const RowSums& call) {
  const auto count = static_cast<size_t>(call.num_rows);
  const auto columns = static_cast<size_t>(call.num_columns);
  const auto num_sources = static_cast<size_t>(call.offsets[count]);
  std::vector<Range> ranges{
      {call.offsets, (count + 1) * sizeof(int64_t), false},
      {call.sources, num_sources * sizeof(void*), false}};
  for (size_t i = 0; i < num_sources; ++i) {
    ranges.push_back({call.sources[i], columns * bytes_of(call.value), false});
  }
  return ranges;
}

// Rows that a kernel reads and writes.
void add_rows(
    std::vector<Range>& ranges,
    const RowSums& call,
    const int64_t* rows,
    void* memory,
    size_t bytes_of_element) {
  const auto count = static_cast<size_t>(call.num_rows);
  const size_t bytes_of_row =
      static_cast<size_t>(call.num_columns) * bytes_of_element;
  ranges.push_back({rows, count * sizeof(int64_t), false});
  for (size_t i = 0; memory != nullptr && i < count; ++i) {
    const auto row = static_cast<size_t>(rows[i]);
    ranges.push_back(
        {static_cast<char*>(memory) + row * bytes_of_row, bytes_of_row, true});
  }
}

int launch_row_sums(RowSums call, void* stream) {
  check_code();
  const auto count = static_cast<size_t>(call.num_rows * call.num_columns);
  const size_t bytes_of_element = bytes_of_sum(call.value);
  auto ranges = sources_of(call);
  if (call.added_to == nullptr) {
    ranges.push_back({call.sums, count * bytes_of_element, true});
  } else {
    add_rows(ranges, call, call.added_to, call.sums, bytes_of_element);
  }
  const auto error = std::make_shared<int>(0);
  launch("row_sums", stream, ranges, [=] {
    *error = testing::emulated_table().launch_row_sums(call, stream);
  });
  return *error;
}

int launch_row_steps(RowSteps call, void* stream) {
  check_code();
  const RowSums& sums = call.gradients;
  auto ranges = sources_of(sums);
  add_rows(ranges, sums, call.rows, call.memory, bytes_of(call.stored));
  const size_t bytes_of_state = bytes_of_sum(call.stored);
  add_rows(ranges, sums, call.rows, call.master, bytes_of_state);
  for (void* const state : call.states) {
    add_rows(ranges, sums, call.rows, state, bytes_of_state);
  }
  const auto error = std::make_shared<int>(0);
  const RuleStep step = *call.step; // a kernel has its own
  launch("row_steps", stream, ranges, [=] {
    RowSteps copy = call;
    copy.step = &step;
    *error = testing::emulated_table().launch_row_steps(copy, stream);
  });
  return *error;
}

int has_code_of_current(bool* result) {
  *result = has_code(current_device().index());
  return 0;
}

// A query of a stream that creates a context on another device, or of the
// default stream, invalidates a capture elsewhere.
int is_capturing(void* stream, bool* result) {
  const std::lock_guard lock(mutex());
  TORCH_CHECK(
      stream != nullptr && stream_of(stream).device() == current_device(),
      "mock_cuda: whether ",
      stream == nullptr ? "a default stream" : place_of(stream_of(stream)),
      " is captured was asked while the current device is ",
      current_device());
  *result = capture_of(stream_of(stream)) != nullptr;
  return 0;
}

int enable_peer(int device, int peer) {
  return enable_peer_access(
             static_cast<c10::DeviceIndex>(device),
             static_cast<c10::DeviceIndex>(peer))
      ? 0
      : kErrorPeerAccessUnsupported;
}

// As table.cu: another current device than `device` gets a context.
void check_host_call(const char* call, int device) {
  const std::lock_guard lock(mutex());
  check_not_capturing(call);
  check_context(static_cast<c10::DeviceIndex>(device));
}

int register_host(int device, void* data, uint64_t size) {
  check_host_call("cudaHostRegister", device);
  return pin_host_memory(data, size) ? 0 : kErrorHostMemoryAlreadyRegistered;
}

int unregister_host(int device, void* data) {
  check_host_call("cudaHostUnregister", device);
  return unpin_host_memory(data) ? 0 : kErrorHostMemoryNotRegistered;
}

const char* error_string(int /*error*/) {
  return "an error of the mock";
}

} // namespace

const Table& table() {
  static const Table table{
      kAbi,
      static_cast<uint32_t>(kLargeParams),
      &launch_sum,
      &launch_rates,
      &launch_copy,
      &launch_select_top,
      &launch_send,
      &launch_receive,
      &launch_row_sums,
      &launch_row_steps,
      &has_code_of_current,
      &is_capturing,
      &enable_peer,
      &register_host,
      &unregister_host,
      &error_string};
  return table;
}

} // namespace torchkv::mock_cuda
