#include "emulated_table.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>
#include <memory>

#include "kernels/cuda/dispatch.h"

namespace torchkv::testing {
namespace {

using namespace kernels::cuda; // NOLINT: all of it

// The parameters as a kernel gets them: a copy, of so many bytes.
class Copy {
 public:
  Copy(const void* params, size_t params_bytes)
      : bank_bytes(params_bytes - offsetof(Params<kSmallParams>, bank)),
        bytes_(new uint64_t[params_bytes / 8]) {
    std::memcpy(bytes_.get(), params, params_bytes);
  }

  const ParamsHead& head() const {
    return *reinterpret_cast<const ParamsHead*>(bytes_.get());
  }
  const char* bank() const {
    return reinterpret_cast<const char*>(bytes_.get()) +
        offsetof(Params<kSmallParams>, bank);
  }
  const KeyHead& key(uint32_t i) const {
    return *reinterpret_cast<const KeyHead*>(bank() + i * head().key_bytes);
  }

  const size_t bank_bytes;

 private:
  std::unique_ptr<uint64_t[]> bytes_;
};

template <typename F>
void for_each_thread(uint32_t num_blocks, F f) {
  for (uint32_t block = num_blocks; block-- > 0;) {
    for (uint32_t thread = kThreads; thread-- > 0;) {
      f(block, thread);
    }
  }
}

template <typename V>
bool run_sum(const Variant& variant, const Copy& params, uint32_t num_blocks) {
  return dispatch_sum<V>(variant, [&](auto sum) {
    for_each_thread(num_blocks, [&](uint32_t block, uint32_t thread) {
      sum_thread<decltype(sum)>(
          params.head(),
          params.bank(),
          params.bank_bytes,
          block,
          num_blocks,
          thread);
    });
  });
}

bool run_sum(const Variant& variant, const Copy& params, uint32_t num_blocks) {
  const auto run = [&](auto run_sum) {
    return run_sum(variant, params, num_blocks);
  };
  switch (variant.value) {
    case Dtype::kFloat:
      return run(run_sum<float>);
    case Dtype::kHalf:
      return run(run_sum<Half>);
    case Dtype::kBFloat16:
      return run(run_sum<BFloat16>);
    case Dtype::kDouble:
      return run(run_sum<double>);
    case Dtype::kBool:
      return run(run_sum<Bool>);
    case Dtype::kInt8:
      return run(run_sum<uint8_t>);
    case Dtype::kInt16:
      return run(run_sum<uint16_t>);
    case Dtype::kInt32:
      return run(run_sum<uint32_t>);
    case Dtype::kInt64:
      return run(run_sum<uint64_t>);
  }
  return false;
}

// Checks every pointer of every key, beyond what a copy does byte by byte.
std::vector<int> alignments_of(const Copy& params) {
  const size_t num_pointers =
      (params.head().key_bytes - sizeof(KeyHead)) / sizeof(void*);
  std::vector<int> alignments;
  for (uint32_t i = 0; i < params.head().num_keys; ++i) {
    const KeyHead& key = params.key(i);
    alignments.push_back(key.alignment);
    const auto check = [&](const void* pointer) {
      const auto address = reinterpret_cast<uintptr_t>(pointer) + key.head;
      EXPECT_TRUE(
          pointer == nullptr || key.head == key.size ||
          address % key.alignment == 0);
    };
    check(key.memory);
    std::for_each_n(pointers_of(key), num_pointers, check);
  }
  return alignments;
}

int launch_sum(
    Variant variant,
    const void* params,
    size_t params_bytes,
    uint32_t num_blocks,
    void* /*stream*/) {
  const Copy copy(params, params_bytes);
  emulated_launches().push_back(
      {false,
       variant,
       copy.head(),
       params_bytes,
       num_blocks,
       alignments_of(copy)});
  EXPECT_TRUE(run_sum(variant, copy, num_blocks));
  return emulated_error();
}

int launch_copy(
    const void* params,
    size_t params_bytes,
    uint32_t num_blocks,
    void* /*stream*/) {
  const Copy copy(params, params_bytes);
  emulated_launches().push_back(
      {true, {}, copy.head(), params_bytes, num_blocks, alignments_of(copy)});
  for_each_thread(num_blocks, [&](uint32_t block, uint32_t thread) {
    copy_thread(copy.head(), copy.bank(), block, num_blocks, thread);
  });
  return emulated_error();
}

Table make_table(size_t params_bytes) {
  Table table{};
  table.abi = kAbi;
  table.params_bytes = static_cast<uint32_t>(params_bytes);
  table.launch_sum = &launch_sum;
  table.launch_copy = &launch_copy;
  return table;
}

} // namespace

const Table& emulated_table(size_t params_bytes) {
  static const Table small = make_table(kSmallParams);
  static const Table large = make_table(kLargeParams);
  return params_bytes == kSmallParams ? small : large;
}

std::vector<EmulatedLaunch>& emulated_launches() {
  static std::vector<EmulatedLaunch> launches;
  return launches;
}

int& emulated_error() {
  static int error = 0;
  return error;
}

} // namespace torchkv::testing
