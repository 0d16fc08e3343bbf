#include "compressed_sums.h"

#include <ATen/OpMathType.h>

#include <algorithm>
#include <numeric>

#include "access.h"
#include "cache_line.h"
#include "chunks.h"
#include "packed_codes.h"
#include "parallel.h"

namespace torchkv::kernels::cpu {
namespace {

int64_t num_bytes_of(c10::ScalarType dtype) {
  return static_cast<int64_t>(c10::elementSize(dtype));
}

// Adds up tiles of a job in buffers of a thread.
template <typename T>
class Tiles {
 public:
  // The sum of the sources' `size` elements from element `first` of the job on,
  // which is element `begin` + `first` of the value.
  const T* sum(
      c10::ArrayRef<CompressedSource> sources,
      int64_t begin,
      int64_t first,
      int64_t size,
      bool keep_residuals) {
    bool is_add = false;
    for (const auto& source : sources) {
      const int64_t stride = num_bytes_of(source.dtype);
      const char* const data = source.data + first * stride;
      if (source.codes != nullptr) {
        source.codes->add(first, size, is_add, codes_, total_);
      } else if (source.codec.id == Codec::Id::kNone) {
        access<T>(source.dtype).load(data, stride, is_add, total_, size);
      } else {
        T* const residual = source.residual == nullptr
            ? nullptr
            : reinterpret_cast<T*>(source.residual) + first;
        T* const kept = keep_residuals ? kept_ : residual;
        add_sent<T>(
            source,
            {data, residual, kept, values_, total_, is_add, size},
            begin + first);
      }
      is_add = true;
    }
    return total_;
  }

 private:
  alignas(kCacheLine) T values_[kTile];
  alignas(kCacheLine) T kept_[kTile];
  alignas(kCacheLine) T total_[kTile];
  alignas(kCacheLine) double codes_[kTile]; // of a dtype of their own
};

template <class Job>
SumLine line_of(const Job& job) {
  return {
      job.accumulation,
      job.dtype,
      job.accumulation,
      *job.step,
      SumLine::Layout::kDense};
}

} // namespace

void CompressedSumBatch::add(const CompressedSum& sum) {
  if (sum.stored.numel() == 0) {
    return;
  }
  Job& job = jobs_.emplace_back();
  job.sources.append(sum.sources.begin(), sum.sources.end());
  job.begin = sum.begin;
  job.num_elements = sum.stored.numel();
  job.stored = static_cast<char*>(sum.stored.mutable_data_ptr());
  job.dtype = sum.stored.scalar_type();
  job.stored_size = num_bytes_of(job.dtype);
  job.accumulation = sum.accumulation;
  job.step = &sum.step;
  job.state = sum.state;
  if (sum.step.rule.id != RuleSpec::Id::kAssign) {
    job.bytes_of_state = num_bytes_of(at::toOpMathType(job.dtype));
  }
  job.bytes_per_element = 2 * job.stored_size;
  for (const auto& source : job.sources) {
    job.bytes_per_element += source.codes != nullptr
        ? source.codes->bytes_per_element()
        : num_bytes_of(source.dtype) +
            (source.residual != nullptr ? 2 * num_bytes_of(job.accumulation)
                                        : 0);
  }
  for (const char* state : job.state.states) {
    job.bytes_per_element += state != nullptr ? 2 * job.bytes_of_state : 0;
  }
}

template <typename T>
void CompressedSumBatch::step_tiles(
    const Job& job,
    int64_t begin,
    int64_t end,
    bool stream) {
  const SumLine line = line_of(job);
  Tiles<T> tiles;
  for (int64_t i = begin; i < end; ++i) {
    const int64_t first = i * kTile;
    const int64_t size = std::min(kTile, job.num_elements - first);
    const auto* const total = reinterpret_cast<const char*>(tiles.sum(
        job.sources, job.begin, first, size, /*keep_residuals=*/false));
    line.dense(
        &total,
        job.stored + first * job.stored_size,
        job.state.at(first, job.bytes_of_state),
        size,
        stream);
  }
  if (stream) {
    end_stream();
  }
}

void CompressedSumBatch::run() const {
  parallel_spans(
      static_cast<int64_t>(jobs_.size()),
      [&](int64_t i) {
        const Job& job = jobs_[i];
        return Work{
            (job.num_elements + kTile - 1) / kTile,
            kTile * job.bytes_per_element,
            /*cut=*/1};
      },
      [&](int64_t i, int64_t begin, int64_t end, bool stream) {
        const Job& job = jobs_[i];
        (job.accumulation == c10::kDouble
             ? &step_tiles<double>
             : &step_tiles<float>)(job, begin, end, stream);
      });
}

template <typename T>
double CompressedSumBatch::tile_norm(
    const Job& job,
    int64_t first,
    int64_t size,
    double scale) {
  Tiles<T> tiles;
  const auto* const total = reinterpret_cast<const char*>(
      tiles.sum(job.sources, job.begin, first, size, /*keep_residuals=*/true));
  return line_of(job).squared_norm(&total, size, scale);
}

double CompressedSumBatch::squared_norm(double scale) const {
  Chunks chunks(kTile);
  for (const auto& job : jobs_) {
    chunks.add_job(job.num_elements, job.bytes_per_element);
  }
  std::vector<double> sums(chunks.size());
  chunks.for_each([&](int64_t i, int64_t chunk, int64_t first, int64_t size) {
    const Job& job = jobs_[i];
    sums[chunk] =
        (job.accumulation == c10::kDouble
             ? &tile_norm<double>
             : &tile_norm<float>)(job, first, size, scale);
  });
  return std::accumulate(sums.begin(), sums.end(), 0.0);
}

} // namespace torchkv::kernels::cpu
