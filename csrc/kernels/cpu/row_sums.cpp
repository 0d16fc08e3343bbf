#include "row_sums.h"

#include <ATen/OpMathType.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstring>
#include <numeric>
#include <optional>

#include "cache_line.h"
#include "group_adagrad.h"
#include "norms.h"
#include "parallel.h"
#include "row_merge.h"

namespace torchkv::kernels::cpu {
namespace {

using RowJob = RowSumBatch::Job;

// About the number of pieces of a source's rows; small pieces have at least so
// many elements.
constexpr int64_t kPieces = 256;
constexpr int64_t kPieceElements = int64_t{16} * 1024;

bool is_assign(const RowJob& job) {
  return job.step->rule.id == RuleSpec::Id::kAssign;
}

// Lines for any number of values, each made when it is first used.
class LinesByCount {
 public:
  explicit LinesByCount(const RowJob& job)
      : LinesByCount(job, job.dtype, *job.step) {}
  LinesByCount(const RowJob& job, c10::ScalarType dtype, const RuleStep& step)
      : job_(job), dtype_(dtype), step_(step) {}

  const SumLine& of(size_t num_values) {
    const bool is_kept = num_values < kept_.size();
    auto& line = is_kept ? kept_[num_values] : other_;
    if (!is_kept || !line) {
      const c10::SmallVector<c10::ScalarType, 8> dtypes(
          num_values, job_.source_dtype);
      line.emplace(
          dtypes, dtype_, job_.accumulation, step_, SumLine::Layout::kDense);
    }
    return *line;
  }

 private:
  const RowJob& job_;
  const c10::ScalarType dtype_; // of the results
  const RuleStep& step_;
  std::array<std::optional<SumLine>, 9> kept_;
  std::optional<SumLine> other_;
};

// Adds up the rows of lines and steps with them.
class StepRows {
 public:
  StepRows(const RowJob& job, bool stream)
      : job_(job),
        lines_(job),
        is_assign_(is_assign(job)),
        stream_(stream && is_assign_) {
    if (is_row_wise(job.step->rule)) {
      const auto arithmetic = at::toOpMathType(job.dtype);
      first_pass_.emplace(
          FirstPass{
              LinesByCount(job, arithmetic, kAssignStep),
              GroupHistories(*job.step, arithmetic, job.row_size)});
    }
  }
  ~StepRows() {
    if (stream_) {
      end_stream();
    }
  }
  C10_DISABLE_COPY_AND_ASSIGN(StepRows);

  // Of the first row of a line, which is processed some lines later.
  TORCHKV_PREFETCHES void prefetch(const RowLine& line) const {
    if (is_assign_) {
      return; // writes what it does not read
    }
    const int64_t first = line.begin - job_.begin;
    const int64_t size = line.end - line.begin;
    fetch(job_.stored + first * job_.stored_size, size * job_.stored_size);
    const StateLine state = job_.state.at(first, job_.bytes_of_state);
    fetch(state.master, size * job_.bytes_of_state);
    for (const char* data : state.states) {
      fetch(data, size * job_.bytes_of_state);
    }
  }

  void operator()(const RowLine& line) {
    // Shorter lines are not worth the instructions that bypass the caches.
    constexpr int64_t kLongBytes = 4096;
    const int64_t first = line.begin - job_.begin;
    const int64_t size = line.end - line.begin;
    char* const stored = job_.stored + first * job_.stored_size;
    if (line.sources.empty()) {
      std::memset(stored, 0, size * job_.stored_size);
    } else if (
        !is_assign_ || line.sources.size() != 1 || line.sources[0] != stored) {
      const StateLine state = job_.state.at(first, job_.bytes_of_state);
      if (first_pass_) {
        first_pass_->histories.add(
            first_pass_->gradients.of(line.sources.size()),
            line.sources,
            job_.source_size,
            state.states[0],
            size);
      }
      lines_.of(line.sources.size())
          .dense(
              line.sources.data(),
              stored,
              state,
              size,
              stream_ && size * job_.stored_size >= kLongBytes);
    }
  }

 private:
  static TORCHKV_PREFETCHES void fetch(const char* data, int64_t num_bytes) {
    if (data != nullptr) {
      prefetch_row</*kIsWritten=*/true>(data, num_bytes);
    }
  }

  const RowJob& job_;
  LinesByCount lines_;
  struct FirstPass {
    LinesByCount gradients;
    GroupHistories histories;
  };
  std::optional<FirstPass> first_pass_; // of row-wise rules
  const bool is_assign_;
  const bool stream_;
};

// Adds up the squares of the gradients in lines.
class SquareRows {
 public:
  SquareRows(const RowJob& job, double scale) : lines_(job), scale_(scale) {}

  void prefetch(const RowLine& /*line*/) const {}
  void operator()(const RowLine& line) {
    sum_ +=
        lines_.of(line.sources.size())
            .squared_norm(line.sources.data(), line.end - line.begin, scale_);
  }
  double sum() const {
    return sum_;
  }

 private:
  LinesByCount lines_;
  const double scale_;
  double sum_ = 0;
};

// The rows of a source in [first, last).
RowSource within(
    RowSource source,
    int64_t first,
    int64_t last,
    int64_t row_bytes) {
  if (source.is_dense) {
    return source;
  }
  const auto* const end = source.ids + source.num_ids;
  const auto* const from = std::lower_bound(source.ids, end, first);
  const auto* const to = std::lower_bound(from, end, last);
  const int64_t skipped = from - source.ids;
  if (source.order != nullptr) {
    source.order += skipped;
  } else {
    source.data += skipped * row_bytes;
  }
  source.ids = from;
  source.num_ids = to - from;
  return source;
}

std::vector<int64_t> find_cuts(const RowJob& job, int64_t first, int64_t last) {
  const int64_t fewest = std::max(kPieceElements / job.row_size, int64_t{1});
  std::vector<int64_t> cuts{first, last};
  cuts.reserve(2 + (job.sources.size() + 1) * kPieces);
  if (job.has_all_rows) {
    const int64_t step = std::max((last - first) / kPieces, fewest);
    for (int64_t row = first + step; row < last; row += step) {
      cuts.push_back(row);
    }
  }
  for (const auto& source : job.sources) {
    const int64_t step = std::max(source.num_ids / kPieces, fewest);
    for (int64_t i = step; i < source.num_ids; i += step) {
      cuts.push_back(source.ids[i]);
    }
  }
  std::sort(cuts.begin(), cuts.end());
  cuts.erase(std::unique(cuts.begin(), cuts.end()), cuts.end());
  return cuts;
}

int64_t bytes_moved(const RowJob& job) {
  const int64_t size = job.end - job.begin;
  int64_t num_summed = 0;
  for (const auto& source : job.sources) {
    num_summed += source.is_dense ? size : source.num_ids * job.row_size;
  }
  int64_t bytes_written = 2 * job.stored_size;
  for (const char* state : job.state.states) {
    bytes_written += state != nullptr ? 2 * job.bytes_of_state : 0;
  }
  return num_summed * job.source_size +
      (job.has_all_rows ? size : std::min(size, num_summed)) * bytes_written;
}

} // namespace

void RowSumBatch::add(const RowSum& sum) {
  if (sum.stored.numel() == 0) {
    return;
  }
  Job& job = jobs_.emplace_back();
  job.source_dtype = sum.dtype;
  job.source_size = static_cast<int64_t>(c10::elementSize(sum.dtype));
  job.row_size = sum.row_size;
  job.begin = sum.begin;
  job.end = sum.begin + sum.stored.numel();
  job.stored = static_cast<char*>(sum.stored.mutable_data_ptr());
  job.dtype = sum.stored.scalar_type();
  job.stored_size = static_cast<int64_t>(c10::elementSize(job.dtype));
  job.accumulation = sum.accumulation;
  job.step = &sum.step;
  job.state = sum.state;
  job.has_all_rows = is_assign(job);
  if (!job.has_all_rows) {
    job.bytes_of_state =
        static_cast<int64_t>(c10::elementSize(at::toOpMathType(job.dtype)));
  }
  const int64_t first = job.begin / job.row_size;
  const int64_t last = (job.end + job.row_size - 1) / job.row_size;
  for (const auto& source : sum.sources) {
    job.sources.push_back(
        within(source, first, last, job.row_size * job.source_size));
    job.has_all_rows = job.has_all_rows || source.is_dense;
  }
  job.cuts = find_cuts(job, first, last);
  const auto num_pieces = static_cast<int64_t>(job.cuts.size()) - 1;
  job.bytes_per_piece = std::max(bytes_moved(job) / num_pieces, int64_t{1});
}

// Calls `body(job, begin, end, stream)` with pieces of each job.
template <class Body>
void RowSumBatch::for_each(Body body) const {
  parallel_spans(
      static_cast<int64_t>(jobs_.size()),
      [&](int64_t i) {
        const Job& job = jobs_[i];
        return Work{
            static_cast<int64_t>(job.cuts.size()) - 1,
            job.bytes_per_piece,
            /*cut=*/1};
      },
      body);
}

void RowSumBatch::run() const {
  const bool needs_norms =
      std::any_of(jobs_.begin(), jobs_.end(), [](const Job& job) {
        return needs_gradient_norm(job.step->rule);
      });
  if (needs_norms) {
    const std::vector<RuleStep> steps = elementwise_steps();
    RowSumBatch scaled = *this;
    for (size_t i = 0; i < steps.size(); ++i) {
      scaled.jobs_[i].step = &steps[i];
    }
    scaled.run();
    return;
  }
  for_each([&](int64_t i, int64_t begin, int64_t end, bool stream) {
    const Job& job = jobs_[i];
    StepRows step(job, stream);
    RowMerge merge(job, step);
    merge.run(job.cuts[begin], job.cuts[end]);
    merge.flush();
  });
}

std::vector<double> RowSumBatch::squared_norms(double scale) const {
  std::vector<std::vector<double>> sums;
  sums.reserve(jobs_.size());
  for (const auto& job : jobs_) {
    sums.emplace_back(job.cuts.size() - 1);
  }
  for_each([&](int64_t i, int64_t begin, int64_t end, bool /*stream*/) {
    const Job& job = jobs_[i];
    for (int64_t piece = begin; piece < end && !is_assign(job); ++piece) {
      SquareRows square(job, scale);
      RowMerge merge(job, square);
      merge.run(job.cuts[piece], job.cuts[piece + 1]);
      merge.flush();
      sums[i][piece] = square.sum();
    }
  });
  std::vector<double> result;
  result.reserve(sums.size());
  for (const auto& of_job : sums) {
    result.push_back(std::accumulate(of_job.begin(), of_job.end(), 0.0));
  }
  return result;
}

double RowSumBatch::squared_norm(double scale) const {
  const std::vector<double> norms = squared_norms(scale);
  return std::accumulate(norms.begin(), norms.end(), 0.0);
}

// The jobs' steps, with the norms that they need.
std::vector<RuleStep> RowSumBatch::elementwise_steps() const {
  const std::vector<double> squares = squared_norms(1);
  std::vector<double> small;
  std::vector<double> large;
  std::vector<RuleStep> steps;
  for (size_t i = 0; i < jobs_.size(); ++i) {
    const Job& job = jobs_[i];
    double norm = std::sqrt(squares[i]);
    const double scale = scale_for(norm);
    if (scale != 1 && c10::toRealValueType(job.dtype) == c10::kDouble) {
      auto& scaled = scale < 1 ? large : small;
      scaled = scaled.empty() ? squared_norms(scale) : scaled;
      norm = std::sqrt(scaled[i]) / scale;
    }
    steps.push_back(
        needs_gradient_norm(job.step->rule) ? elementwise_step(
                                                  *job.step,
                                                  job.dtype,
                                                  job.stored,
                                                  job.state.master,
                                                  job.end - job.begin,
                                                  norm)
                                            : *job.step);
  }
  return steps;
}

} // namespace torchkv::kernels::cpu
