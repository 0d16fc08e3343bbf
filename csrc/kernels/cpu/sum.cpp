#include "sum.h"

#include <ATen/OpMathType.h>

#include <numeric>
#include <vector>

#include "cache_line.h"
#include "chunks.h"
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

SumLine SumBatch::line_of(size_t i) const {
  const Job& job = jobs_[i];
  const size_t first = i == 0 ? 0 : jobs_[i - 1].values_end;
  return {
      {dtypes_.data() + first, job.values_end - first},
      job.dtype,
      job.accumulation,
      *job.step,
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
  return jobs_[i].state.at(begin * jobs_[i].bytes_of_state);
}

void SumBatch::run() const {
  bool has_lamb = false;
  for (const auto& job : jobs_) {
    has_lamb = has_lamb || job.step->rule.id == RuleSpec::Id::kLamb;
  }
  parallel_spans(
      static_cast<int64_t>(jobs_.size()),
      [&](int64_t i) {
        return Work{jobs_[i].num_elements, jobs_[i].bytes_per_element};
      },
      [&](int64_t i, int64_t begin, int64_t end, bool stream) {
        const Job& job = jobs_[i];
        line_of(i).dense(
            values_of(i, begin).data(),
            job.stored + begin * size_of(job.dtype),
            state_of(i, begin),
            end - begin,
            stream);
        if (stream) {
          end_stream();
        }
      });
  if (has_lamb) {
    run_lamb();
  }
}

double SumBatch::squared_norm(double scale) const {
  Chunks chunks;
  for (const auto& job : jobs_) {
    chunks.add_job(job.num_elements, job.bytes_per_element);
  }
  std::vector<double> sums(chunks.size());
  chunks.for_each([&](int64_t i, int64_t chunk, int64_t first, int64_t size) {
    sums[chunk] =
        line_of(i).squared_norm(values_of(i, first).data(), size, scale);
  });
  return std::accumulate(sums.begin(), sums.end(), 0.0);
}

} // namespace torchkv::kernels::cpu
