#include "parallel.h"

#include <ATen/Parallel.h>
#include <c10/util/SmallVector.h>

#include <algorithm>
#include <atomic>
#include <fstream>

#include "../../core/process.h"

namespace torchkv::kernels::cpu {
namespace {

// Less work than this costs less than waking a thread: a few microseconds.
constexpr int64_t kSerialBytes = int64_t{256} * 1024;
// What a thread takes at a time: large enough to amortize taking it, and small
// enough that all threads finish at about the same time.
constexpr int64_t kPieceBytes = int64_t{2} * 1024 * 1024;
constexpr int64_t kPiecesPerThread = 4;
// The fixed cost of a job, in bytes.
constexpr int64_t kJobBytes = 512;

// The last-level cache of the first core. Not sysconf, which in a virtual
// machine may count every such cache of the host.
int64_t cache_bytes() {
  static const int64_t bytes = [] {
    constexpr int64_t kUsual = int64_t{32} * 1024 * 1024;
    std::ifstream file("/sys/devices/system/cpu/cpu0/cache/index3/size");
    int64_t size = 0;
    char unit = 0;
    return file >> size >> unit && unit == 'K' && size > 0 ? size * 1024
                                                           : kUsual;
  }();
  return bytes;
}

// The threads that a call takes, of those that concurrent calls in this process
// leave free.
class ThreadShare {
 public:
  explicit ThreadShare(int64_t wanted) {
    const int64_t limit = at::get_num_threads();
    int64_t in_use = in_use_;
    do {
      size_ =
          std::clamp(wanted, int64_t{1}, std::max(int64_t{1}, limit - in_use));
    } while (!in_use_.compare_exchange_weak(in_use, in_use + size_));
  }
  ~ThreadShare() {
    in_use_ -= size_;
  }
  ThreadShare(const ThreadShare&) = delete;
  ThreadShare& operator=(const ThreadShare&) = delete;

  int64_t size() const {
    return size_;
  }

 private:
  static inline std::atomic<int64_t> in_use_{0};

  int64_t size_ = 1;
};

struct Span {
  int64_t job = 0;
  int64_t begin = 0;
  int64_t end = 0;
};

// Spans in the order of the jobs, and where each piece ends.
struct Plan {
  c10::SmallVector<Span, 16> spans;
  c10::SmallVector<size_t, 16> piece_ends;
};

Plan make_plan(
    int64_t num_jobs,
    c10::function_ref<Work(int64_t job)> work,
    int64_t piece_bytes) {
  Plan plan;
  int64_t bytes = 0; // in the piece so far
  for (int64_t job = 0; job < num_jobs; ++job) {
    const Work whole = work(job);
    const int64_t most =
        std::max(piece_bytes / whole.bytes_per_unit / whole.cut, int64_t{1}) *
        whole.cut;
    bytes += kJobBytes;
    for (int64_t begin = 0; begin < whole.num_units; begin += most) {
      const int64_t end = std::min(begin + most, whole.num_units);
      plan.spans.push_back({job, begin, end});
      bytes += (end - begin) * whole.bytes_per_unit;
      if (bytes >= piece_bytes) {
        plan.piece_ends.push_back(plan.spans.size());
        bytes = 0;
      }
    }
  }
  if (plan.piece_ends.empty() || plan.piece_ends.back() != plan.spans.size()) {
    plan.piece_ends.push_back(plan.spans.size());
  }
  return plan;
}

} // namespace

void parallel_spans(
    int64_t num_jobs,
    c10::function_ref<Work(int64_t job)> work,
    c10::function_ref<
        void(int64_t job, int64_t begin, int64_t end, bool stream)> body) {
  int64_t bytes = 0;
  for (int64_t job = 0; job < num_jobs; ++job) {
    const Work whole = work(job);
    bytes += whole.num_units * whole.bytes_per_unit + kJobBytes;
  }
  const bool stream = bytes > cache_bytes();
  const auto run_serially = [&] {
    for (int64_t job = 0; job < num_jobs; ++job) {
      body(job, 0, work(job).num_units, stream);
    }
  };
  if (bytes <= kSerialBytes || at::in_parallel_region() || fork_count() != 0) {
    run_serially();
    return;
  }
  const ThreadShare threads(bytes / (kSerialBytes / 2));
  if (threads.size() == 1) {
    run_serially();
    return;
  }
  const Plan plan = make_plan(
      num_jobs,
      work,
      std::min(kPieceBytes, bytes / (threads.size() * kPiecesPerThread)));
  const auto num_pieces = plan.piece_ends.size();
  std::atomic<size_t> next_piece{0};
  at::parallel_for(0, threads.size(), /*grain_size=*/1, [&](int64_t, int64_t) {
    for (size_t piece = next_piece++; piece < num_pieces;
         piece = next_piece++) {
      const size_t first = piece == 0 ? 0 : plan.piece_ends[piece - 1];
      for (size_t i = first; i < plan.piece_ends[piece]; ++i) {
        const Span& span = plan.spans[i];
        body(span.job, span.begin, span.end, stream);
      }
    }
  });
}

} // namespace torchkv::kernels::cpu
