// torchkv_frame_fuzz [inputs] [seed] [batch]: decodes what no process of the
// job has sent, and gives what is accepted to live servers and workers. Build
// it with sanitizers. To run a batch again: 400 inputs from that batch on.
#include <algorithm>
#include <chrono>
#include <cinttypes>
#include <cstdio>
#include <cstdlib>
#include <exception>
#include <optional>
#include <string>
#include <utility>

#include "fuzz_session.h"

#if defined(__SANITIZE_ADDRESS__)
// Of sanitizer/*_interface.h, which gcc does not have all of.
extern "C" {
void __sanitizer_set_death_callback(void (*callback)());
int __sanitizer_install_malloc_and_free_hooks(
    void (*on_malloc)(const volatile void* at, size_t size),
    void (*on_free)(const volatile void* at));
size_t __sanitizer_get_current_allocated_bytes();
}
#endif

namespace torchkv::dist {
namespace {

struct Progress {
  uint64_t seed = 1;
  uint64_t batch = 0;
  int64_t inputs = 0;
};
Progress progress;

void print_progress() {
  std::fprintf(
      stderr,
      "seed %" PRIu64 ", batch %" PRIu64 ", input %" PRId64 "\n",
      progress.seed,
      progress.batch,
      progress.inputs);
}

// Bytes that were allocated since the last reset, and that are in use.
#if defined(__SANITIZE_ADDRESS__)
size_t num_allocated = 0;

void watch_memory() {
  __sanitizer_set_death_callback(print_progress);
  const auto on_malloc = [](const volatile void* /*at*/, size_t size) {
    num_allocated += size;
  };
  const auto on_free = [](const volatile void* /*at*/) {};
  fuzz_expect(
      __sanitizer_install_malloc_and_free_hooks(on_malloc, on_free) > 0,
      "no hooks");
}
size_t in_use() {
  return __sanitizer_get_current_allocated_bytes();
}
#else
size_t num_allocated = 0;

void watch_memory() {}
size_t in_use() {
  return 0;
}
#endif

// Of memory for each byte of a head: a message has a few hundred bytes, and can
// be one byte long; it is moved as the frame grows.
constexpr size_t kMaxGrowth = 4 * sizeof(Message);
// The same for a session, of what it has handed over.
constexpr size_t kMaxCoreGrowth = 1;
constexpr size_t kCoreBytes = size_t{512} << 10U;

// Inputs for the format alone.
int64_t run_format(uint64_t seed, int64_t max_inputs) {
  FrameMutator mutator(seed);
  RandomFrames& random = mutator.random();
  int64_t num_accepted = 0;
  for (int64_t i = 0; i < max_inputs;) {
    const auto direction =
        random.chance(2) ? Direction::kRequest : Direction::kAnswer;
    const Frame frame = random.frame(direction, 1 + random.below(6));
    const Frame other = random.frame(direction, 1 + random.below(3));
    for (int copy = 0; copy < 16 && i < max_inputs; ++copy, ++i) {
      ++progress.inputs;
      const auto input = random.chance(8)
          ? mutator.noise(direction)
          : mutator.mutated(frame, other, direction);
      if (fuzz_decode(input, direction, kRandomLimits)) {
        ++num_accepted;
      }
    }
  }
  return num_accepted;
}

struct Totals {
  int64_t accepted = 0;
  int64_t handed_over = 0;
  int64_t rounds = 0;
  int64_t returns = 0;
  size_t most_memory = 0;
};

void run_session(
    uint64_t seed,
    bool is_calm,
    int64_t max_inputs,
    Totals& totals) {
  const size_t before = in_use();
  FuzzSession session(seed, is_calm);
  session.run(max_inputs);
  progress.inputs += session.num_inputs();
  const size_t after = in_use();
  const size_t used = after > before ? after - before : 0;
  fuzz_expect(
      used <= kCoreBytes + kMaxCoreGrowth * session.num_bytes(),
      "too much memory in the cores");
  totals.accepted += session.num_accepted();
  totals.handed_over += session.num_accepted();
  totals.rounds += session.num_rounds();
  totals.returns += session.num_returns();
  totals.most_memory = std::max(totals.most_memory, used);
}

} // namespace

size_t fuzz_allocated() {
  return std::exchange(num_allocated, 0);
}

void fuzz_failed(const char* what) {
  std::fprintf(stderr, "failed: %s\n", what);
  print_progress();
  std::abort();
}

std::optional<Frame> fuzz_decode(
    const FrameMutator::Input& input,
    Direction direction,
    const Limits& limits) {
  const Blob head = to_blob(input.head);
  fuzz_allocated();
  auto frame = decode(head, input.payloads, direction, random_token(), limits);
  fuzz_expect(
      fuzz_allocated() <= kMaxGrowth * head.size(),
      "too much memory for the head's size");
  if (!frame) {
    return std::nullopt;
  }
  const Encoded again = encode(*frame, direction, random_token());
  fuzz_expect(again.head == input.head, "another encoding");
  fuzz_expect(again.payloads.size() == input.payloads.size(), "other payloads");
  for (size_t i = 0; i < again.payloads.size(); ++i) {
    fuzz_expect(
        again.payloads[i].data() == input.payloads[i].data() &&
            again.payloads[i].size() == input.payloads[i].size(),
        "another payload");
  }
  const auto second = decode(
      to_blob(again.head), again.payloads, direction, random_token(), limits);
  fuzz_expect(second && same(*second, *frame), "another frame");
  return frame;
}

int fuzz(int64_t max_inputs, uint64_t first_batch) {
  constexpr int64_t kBatch = 400;
  std::set_terminate([] { fuzz_failed("an exception"); });
  watch_memory();
  const auto begin = std::chrono::steady_clock::now();
  const auto seconds = [&] {
    const auto passed = std::chrono::steady_clock::now() - begin;
    return std::chrono::duration<double>(passed).count();
  };
  Totals totals;
  int64_t next_report = 0;
  for (progress.batch = first_batch; progress.inputs < max_inputs;
       ++progress.batch) {
    const uint64_t seed = progress.seed * 1000003 + progress.batch;
    const int64_t left = std::min(kBatch, max_inputs - progress.inputs);
    if (progress.batch % 2 == 0) {
      totals.accepted += run_format(seed, left);
    } else {
      run_session(seed, progress.batch % 32 == 1, left, totals);
    }
    if (progress.inputs >= next_report || progress.inputs >= max_inputs) {
      std::printf(
          "%" PRId64 " inputs, %.0f/s, %" PRId64 " accepted, %" PRId64
          " by a core, %" PRId64 " rounds, %" PRId64
          " returns,"
          " at most %zu bytes in a session\n",
          progress.inputs,
          static_cast<double>(progress.inputs) / seconds(),
          totals.accepted,
          totals.handed_over,
          totals.rounds,
          totals.returns,
          totals.most_memory);
      std::fflush(stdout);
      next_report += 1000000;
    }
  }
  return 0;
}

} // namespace torchkv::dist

int main(int argc, char** argv) {
  using namespace torchkv::dist;
  const int64_t inputs = argc > 1 ? std::stoll(argv[1]) : 10000000;
  if (argc > 2) {
    progress.seed = std::stoull(argv[2]);
  }
  return fuzz(inputs, argc > 3 ? std::stoull(argv[3]) : 0);
}
