#include "emulated_table.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>
#include <memory>

#include "kernels/cuda/copy_thread.h"
#include "kernels/cuda/dispatch.h"
#include "kernels/cuda/rate_thread.h"
#include "kernels/cuda/receive_thread.h"
#include "kernels/cuda/row_step_thread.h"
#include "kernels/cuda/row_sum_thread.h"
#include "kernels/cuda/select_top_thread.h"
#include "kernels/cuda/send_thread.h"

namespace torchkv::testing {
namespace {

using namespace kernels::cuda; // NOLINT: all of it

// The parameters as a kernel receives them: a copy of this many bytes.
class Copy {
 public:
  explicit Copy(const Launch& launch)
      : bank_bytes(launch.params_bytes - offsetof(Params<kSmallParams>, bank)),
        bytes_(new uint64_t[launch.params_bytes / 8]) {
    std::memcpy(bytes_.get(), launch.params, launch.params_bytes);
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

// add_shares for all threads of a block, as if in lockstep.
template <typename T>
T sum_of_shares(std::vector<T> shares) {
  for (uint32_t half = kThreads / 2; half > 0; half /= 2) {
    for (uint32_t thread = 0; thread < half; ++thread) {
      shares[thread] += shares[thread + half];
    }
  }
  return shares[0];
}

template <typename V>
bool run_sum(const Variant& variant, const Copy& params) {
  return dispatch_sum<V>(variant, [&](auto sum) {
    using P = decltype(sum);
    std::vector<typename P::squares_t> shares(kThreads);
    for_each_thread(
        params.head().num_chunks, [&](uint32_t block, uint32_t thread) {
          shares[thread] = sum_thread<P>(
              params.head(), params.bank(), params.bank_bytes, block, thread);
          if constexpr (P::kHasSquares) {
            if (thread == 0) {
              *squares_of<P>(params.head(), params.bank(), block) =
                  sum_of_shares(shares);
            }
          }
        });
  });
}

bool run_sum(const Variant& variant, const Copy& params) {
  bool is_known = false;
  dispatch_dtype(variant.value, [&](auto value) {
    is_known = run_sum<decltype(value)>(variant, params);
  });
  return is_known;
}

// Checks every pointer of every key but those of numbers; a copy handles its
// first `head` bytes singly.
std::vector<int> alignments_of(const Copy& params, Rule rule = Rule::kAssign) {
  const size_t count =
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
    if (rule != Rule::kNorm) {
      check(key.memory);
    }
    for (size_t place = 0; place < count; ++place) {
      if (!has_numbers(rule) || place + 1 != num_pointers(rule)) {
        check(pointers_of(key)[place]);
      }
    }
  }
  return alignments;
}

int launch_sum(Variant variant, Launch launch) {
  const Copy copy(launch);
  emulated_launches().push_back(
      {false,
       variant,
       copy.head(),
       launch.params_bytes,
       alignments_of(copy, variant.rule)});
  EXPECT_TRUE(run_sum(variant, copy));
  return emulated_error();
}

int launch_rates(Launch launch) {
  const Copy copy(launch);
  emulated_launches().push_back(
      {false, {}, copy.head(), launch.params_bytes, {}});
  EXPECT_EQ(copy.head().num_chunks, copy.head().num_keys);
  std::vector<Squares> shares(kThreads);
  for_each_thread(copy.head().num_chunks, [&](uint32_t block, uint32_t thread) {
    shares[thread] = rate_share(copy.head(), copy.bank(), block, thread);
    if (thread == 0) {
      store_rate(
          copy.head(),
          copy.bank(),
          copy.bank_bytes,
          block,
          sum_of_shares(shares));
    }
  });
  return emulated_error();
}

int launch_copy(Launch launch) {
  const Copy copy(launch);
  emulated_launches().push_back(
      {true, {}, copy.head(), launch.params_bytes, alignments_of(copy)});
  for_each_thread(copy.head().num_chunks, [&](uint32_t block, uint32_t thread) {
    copy_thread(copy.head(), copy.bank(), block, thread);
  });
  return emulated_error();
}

// The maximum of the threads' shares, as if in lockstep.
template <class Thread>
void share_scales(std::vector<Thread>& threads) {
  constexpr uint32_t kGroup = Thread::kThreadsOfScale;
  std::vector<typename Thread::number_t> shares;
  for (const auto& thread : threads) {
    shares.push_back(thread.largest());
  }
  for (uint32_t half = kGroup / 2; half > 0; half /= 2) {
    for (uint32_t thread = 0; thread < kThreads; ++thread) {
      keep_larger<kGroup>(shares.data(), thread, half);
    }
  }
  for (uint32_t thread = 0; thread < kThreads; ++thread) {
    threads[thread].scale_by(shares[thread / kGroup * kGroup]);
  }
}

template <class Thread>
void run_send(const Send& send) {
  const int64_t num_blocks = (send.num_elements + kSendChunk - 1) / kSendChunk;
  for (auto block = static_cast<uint32_t>(num_blocks); block-- > 0;) {
    std::vector<Thread> threads;
    for (uint32_t thread = 0; thread < kThreads; ++thread) {
      threads.emplace_back(block, thread).begin(send);
    }
    for (uint32_t k = 0; k < send.num_values; ++k) {
      for (auto& thread : threads) {
        thread.load(send, k);
      }
      if constexpr (Thread::kThreadsOfScale != 0) {
        share_scales(threads);
      }
      for (auto& thread : threads) {
        thread.add(send, k);
      }
    }
    for (const auto& thread : threads) {
      thread.finish(send);
    }
  }
}

// A GPU reports an error for a word at another address, where a CPU does not.
void expect_aligned(const void* pointer) {
  EXPECT_EQ(reinterpret_cast<uintptr_t>(pointer) % kWord, 0U);
}

// A pass over value `k`.
template <typename V>
void run_top_pass(const SelectTop& call, const TopPass& pass, uint32_t k) {
  if (is_found(call, pass, k)) {
    return;
  }
  TopState& state = *call.values[k].state;
  const auto num_chunks = static_cast<uint32_t>(num_top_chunks(call));
  for_each_thread(num_chunks, [&](uint32_t chunk, uint32_t thread) {
    uint32_t digits[kSendPack];
    find_top_digits<V>(call, pass, k, chunk, thread, digits);
    for (const uint32_t digit : digits) {
      if (digit != kNoTopDigit) {
        ++state.counts[digit];
      }
    }
  });
  std::vector<TopChoice> threads;
  std::vector<int64_t> sums;
  for (uint32_t thread = 0; thread < kThreads; ++thread) {
    sums.push_back(threads.emplace_back(call, pass, k, thread).sum());
  }
  for (auto& thread : threads) {
    thread.choose(call, pass, sums.data());
  }
}

int launch_select_top(SelectTop call, void* /*stream*/) {
  if (call.is_aligned) {
    std::for_each_n(call.values, call.num_values, [](const TopValue& value) {
      expect_aligned(value.values);
      expect_aligned(value.residual);
    });
  }
  EXPECT_TRUE(dispatch_select_top(call, [&](auto value) {
    using V = decltype(value);
    for_each_top_pass<V>(call.num_elements, [&](const TopPass& pass) {
      for (uint32_t k = 0; k < call.num_values; ++k) {
        run_top_pass<V>(call, pass, k);
      }
    });
  }));
  return emulated_error();
}

int launch_send(Send send, void* /*stream*/) {
  if (send.is_aligned) {
    expect_aligned(send.sum);
    std::for_each_n(send.values, send.num_values, [](const SentValue& value) {
      expect_aligned(value.values);
      expect_aligned(value.residual);
      expect_aligned(value.kept);
    });
  }
  EXPECT_TRUE(dispatch_send(
      send, [&](auto tag) { run_send<typename decltype(tag)::type>(send); }));
  return emulated_error();
}

int launch_receive(Receive call, void* /*stream*/) {
  if (call.is_aligned) {
    expect_aligned(call.sum);
    std::for_each_n(
        call.values, call.num_values, [](const ReceivedValue& value) {
          expect_aligned(value.memory);
        });
  }
  EXPECT_TRUE(dispatch_receive(call, [&](auto tag) {
    using Tag = decltype(tag);
    for_each_thread(
        num_receive_blocks(call), [&](uint32_t block, uint32_t thread) {
          receive_thread<typename Tag::number_t, Tag::kId>(call, block, thread);
        });
  }));
  return emulated_error();
}

template <typename V, int kSize>
void run_row_packs(const RowSums& call) {
  for_each_thread(
      num_row_blocks<kSize>(call), [&](uint32_t block, uint32_t thread) {
        row_sum_thread<V, kSize>(call, block, thread);
      });
}

void expect_aligned_rows(const RowSums& call, int pack) {
  EXPECT_EQ(call.num_columns % pack, 0);
  std::for_each_n(call.sources, call.offsets[call.num_rows], &expect_aligned);
}

template <typename V>
void run_row_sums(const RowSums& call) {
  if (call.is_aligned) {
    expect_aligned(call.sums);
    expect_aligned_rows(call, kRowPack<V>);
    run_row_packs<V, kRowPack<V>>(call);
  } else {
    run_row_packs<V, 1>(call);
  }
}

int launch_row_sums(RowSums call, void* /*stream*/) {
  EXPECT_TRUE(dispatch_dtype(
      call.value, [&](auto value) { run_row_sums<decltype(value)>(call); }));
  return emulated_error();
}

template <typename V, typename S, int kSize>
void run_row_steps(const RowSteps& call) {
  const RowStepParams<arithmetic_t<S>> params(call);
  for_each_thread(
      num_row_blocks<kSize>(call.gradients),
      [&](uint32_t block, uint32_t thread) {
        row_step_thread<V, S, kSize>(params, block, thread);
      });
}

int launch_row_steps(RowSteps call, void* /*stream*/) {
  EXPECT_TRUE(dispatch_row_steps(call, [&](auto value, auto stored) {
    using V = decltype(value);
    using S = decltype(stored);
    constexpr int kPack = kRowStepPack<S>;
    if (!call.gradients.is_aligned) {
      run_row_steps<V, S, 1>(call);
      return;
    }
    expect_aligned_rows(call.gradients, kPack);
    expect_aligned(call.memory);
    expect_aligned(call.master);
    std::for_each(call.states.begin(), call.states.end(), &expect_aligned);
    run_row_steps<V, S, kPack>(call);
  }));
  return emulated_error();
}

Table make_table(size_t params_bytes) {
  Table table{};
  table.abi = kAbi;
  table.params_bytes = static_cast<uint32_t>(params_bytes);
  table.launch_sum = &launch_sum;
  table.launch_rates = &launch_rates;
  table.launch_copy = &launch_copy;
  table.launch_select_top = &launch_select_top;
  table.launch_send = &launch_send;
  table.launch_receive = &launch_receive;
  table.launch_row_sums = &launch_row_sums;
  table.launch_row_steps = &launch_row_steps;
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
