#include "sum.h"

#include <ATen/OpMathType.h>

#include <algorithm>
#include <cmath>
#include <numeric>
#include <vector>

#include "cache_line.h"
#include "chunks.h"
#include "lamb.h"
#include "parallel.h"

namespace torchkv::kernels::cpu {
namespace {

int64_t size_of(c10::ScalarType dtype) {
  return static_cast<int64_t>(c10::elementSize(dtype));
}

} // namespace

int64_t Sum::bytes_of_state() const {
  return step.rule.id == RuleSpec::Id::kAssign
      ? 0
      : size_of(at::toOpMathType(stored.scalar_type()));
}

void SumBatch::add(const Sum& sum) {
  if (sum.stored.numel() == 0) {
    return; // its memory may be null
  }
  Job job;
  job.num_elements = sum.stored.numel();
  job.dtype = sum.stored.scalar_type();
  job.bytes_per_element = size_of(job.dtype);
  for (const auto& value : sum.values) {
    values_.push_back(static_cast<const char*>(value.data->const_data_ptr()));
    dtypes_.push_back(value.data->scalar_type());
    job.bytes_per_element += size_of(dtypes_.back());
  }
  job.values_end = values_.size();
  for (const auto& out : sum.outs) {
    outs_.push_back(static_cast<char*>(out.mutable_data_ptr()));
    job.bytes_per_element += size_of(job.dtype);
  }
  job.outs_end = outs_.size();
  job.stored = static_cast<char*>(sum.stored.mutable_data_ptr());
  job.accumulation = sum.accumulation;
  job.step = &sum.step;
  job.state = sum.state;
  job.bytes_of_state = sum.bytes_of_state();
  for (const char* state : job.state.states) {
    job.bytes_per_element += state != nullptr ? 2 * job.bytes_of_state : 0;
  }
  jobs_.push_back(job);
}

SumLine SumBatch::line_of(size_t i, const RuleStep& step) const {
  const Job& job = jobs_[i];
  const size_t first = i == 0 ? 0 : jobs_[i - 1].values_end;
  return {
      {dtypes_.data() + first, job.values_end - first},
      job.dtype,
      job.accumulation,
      step,
      SumLine::Layout::kDense};
}

c10::SmallVector<const char*, 8> SumBatch::values_of(size_t i, int64_t begin)
    const {
  c10::SmallVector<const char*, 8> values;
  for (size_t k = i == 0 ? 0 : jobs_[i - 1].values_end; k < jobs_[i].values_end;
       ++k) {
    values.push_back(values_[k] + begin * size_of(dtypes_[k]));
  }
  return values;
}

StateLine SumBatch::state_of(size_t i, int64_t begin) const {
  return jobs_[i].state.at(begin, jobs_[i].bytes_of_state);
}

void SumBatch::run() const {
  const auto has = [&](auto is_such) {
    return std::any_of(jobs_.begin(), jobs_.end(), [&](const Job& job) {
      return is_such(job.step->rule);
    });
  };
  const bool has_scaled = has(needs_gradient_norm);
  const std::vector<RuleStep> steps =
      has_scaled ? elementwise_steps() : std::vector<RuleStep>();
  parallel_spans(
      static_cast<int64_t>(jobs_.size()),
      [&](int64_t i) {
        return Work{jobs_[i].num_elements, jobs_[i].bytes_per_element};
      },
      [&](int64_t i, int64_t begin, int64_t end, bool stream) {
        const Job& job = jobs_[i];
        const RuleStep& step = has_scaled ? steps[i] : *job.step;
        if (job.outs_end != (i == 0 ? 0 : jobs_[i - 1].outs_end)) {
          run_with_outs(i, step, begin, end, stream);
        } else {
          line_of(i, step).dense(
              values_of(i, begin).data(),
              job.stored + begin * size_of(job.dtype),
              state_of(i, begin),
              end - begin,
              stream);
        }
        if (stream) {
          end_stream();
        }
      });
  if (has([](const RuleSpec& rule) { return is_lamb(rule); })) {
    run_lamb();
  }
}

// In pieces, which are in a cache when the outs are written.
void SumBatch::run_with_outs(
    size_t i,
    const RuleStep& step,
    int64_t begin,
    int64_t end,
    bool stream) const {
  constexpr int64_t kStreamed = 8192; // in that of the first level
  constexpr int64_t kOthers = 131'072; // in that of the second one
  const Job& job = jobs_[i];
  const int64_t size = size_of(job.dtype);
  const SumLine line = line_of(i, step);
  // Past the caches, a sum is written as the outs are.
  const bool is_apart = stream && step.rule.id == RuleSpec::Id::kAssign;
  alignas(kCacheLine) char sum[kStreamed];
  c10::SmallVector<char*, 4> outs(
      outs_.begin() + static_cast<int64_t>(i == 0 ? 0 : jobs_[i - 1].outs_end),
      outs_.begin() + static_cast<int64_t>(job.outs_end));
  if (is_apart) {
    outs.push_back(job.stored);
  }
  for (auto& out : outs) {
    out += begin * size;
  }
  while (begin < end) {
    const int64_t count =
        std::min(end - begin, (stream ? kStreamed : kOthers) / size);
    char* const to = is_apart ? sum : job.stored + begin * size;
    line.dense(
        values_of(i, begin).data(),
        to,
        state_of(i, begin),
        count,
        /*stream=*/false);
    copy_line(to, outs, count * size, stream);
    for (auto& out : outs) {
      out += count * size;
    }
    begin += count;
  }
}

double SumBatch::squared_norm(double scale) const {
  Chunks chunks(kNormChunk);
  for (const auto& job : jobs_) {
    chunks.add_job(job.num_elements, job.bytes_per_element);
  }
  std::vector<double> sums(chunks.size());
  chunks.for_each([&](int64_t i, int64_t chunk, int64_t first, int64_t size) {
    sums[chunk] = line_of(i, *jobs_[i].step)
                      .squared_norm(values_of(i, first).data(), size, scale);
  });
  return std::accumulate(sums.begin(), sums.end(), 0.0);
}

// The norms of the jobs that `includes(i)`. `squares(i, first, size, scales)`
// are those of a part, whose numbers are multiplied by their scale first.
template <class Includes, class Squares>
std::vector<Norms> SumBatch::norms_of(Includes includes, Squares squares)
    const {
  const auto chunks_of = [&](auto is_included) {
    Chunks chunks(kNormChunk);
    for (size_t i = 0; i < jobs_.size(); ++i) {
      chunks.add_job(
          is_included(i) ? jobs_[i].num_elements : 0,
          jobs_[i].bytes_per_element);
    }
    return chunks;
  };
  std::vector<Norms> scales(jobs_.size(), {1, 1});
  std::vector<Norms> norms(jobs_.size());
  const auto find_norms = [&](const Chunks& chunks) {
    std::vector<Norms> found(chunks.size());
    chunks.for_each([&](int64_t i, int64_t chunk, int64_t first, int64_t size) {
      found[chunk] = squares(i, first, size, scales[i]);
    });
    for (size_t i = 0; i < jobs_.size(); ++i) {
      Norms sum;
      for (int64_t chunk = chunks.end(i); chunk < chunks.end(i + 1); ++chunk) {
        sum.weight += found[chunk].weight;
        sum.step += found[chunk].step;
      }
      if (chunks.end(i) != chunks.end(i + 1)) {
        norms[i] = {
            std::sqrt(sum.weight) / scales[i].weight,
            std::sqrt(sum.step) / scales[i].step};
      }
    }
  };
  find_norms(chunks_of(includes));
  const Chunks out_of_range = chunks_of([&](size_t i) {
    if (c10::toRealValueType(jobs_[i].dtype) == c10::kDouble) {
      scales[i] = {scale_for(norms[i].weight), scale_for(norms[i].step)};
    }
    return includes(i) && (scales[i].weight != 1 || scales[i].step != 1);
  });
  if (out_of_range.size() != 0) {
    find_norms(out_of_range);
  }
  return norms;
}

// The jobs' steps, with the norms that they need.
std::vector<RuleStep> SumBatch::elementwise_steps() const {
  const auto needs_norms = [&](size_t i) {
    return needs_gradient_norm(jobs_[i].step->rule);
  };
  const std::vector<Norms> norms = norms_of(
      needs_norms, [&](int64_t i, int64_t first, int64_t size, Norms scales) {
        return Norms{
            1, // elementwise_step() finds it; 0 would be measured again in fp64
            line_of(i, *jobs_[i].step)
                .squared_norm(values_of(i, first).data(), size, scales.step)};
      });
  std::vector<RuleStep> steps;
  for (size_t i = 0; i < jobs_.size(); ++i) {
    const Job& job = jobs_[i];
    steps.push_back(
        needs_norms(i) ? elementwise_step(
                             *job.step,
                             job.dtype,
                             job.stored,
                             job.state.master,
                             job.num_elements,
                             norms[i].step)
                       : *job.step);
  }
  return steps;
}

// The second half of LAMB: the norms of weights and directions, then the steps.
void SumBatch::run_lamb() const {
  const auto is_included = [&](size_t i) {
    return is_lamb(jobs_[i].step->rule);
  };
  const auto line_of = [&](int64_t i, int64_t first) {
    const Job& job = jobs_[i];
    char* const stored = job.stored + first * size_of(job.dtype);
    return LambLine(*job.step, job.dtype, stored, state_of(i, first));
  };
  const std::vector<Norms> norms = norms_of(
      is_included, [&](int64_t i, int64_t first, int64_t size, Norms scales) {
        return line_of(i, first).squared_norms(size, scales);
      });
  parallel_spans(
      static_cast<int64_t>(jobs_.size()),
      [&](int64_t i) {
        return Work{
            is_included(i) ? jobs_[i].num_elements : 0,
            jobs_[i].bytes_per_element};
      },
      [&](int64_t i, int64_t begin, int64_t end, bool /*stream*/) {
        line_of(i, begin).move(norms[i], end - begin);
      });
}

} // namespace torchkv::kernels::cpu
