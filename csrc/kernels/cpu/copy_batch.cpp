#include "copy_batch.h"

#include "cache_line.h"
#include "lines.h"
#include "parallel.h"

namespace torchkv::kernels::cpu {

void CopyBatch::add(const at::Tensor& source, const at::Tensor& out) {
  if (source.numel() != 0) { // else its memory may be null
    add(source.const_data_ptr(), source.nbytes(), out.mutable_data_ptr());
  }
}

void CopyBatch::add(const void* source, size_t num_bytes, void* out) {
  const auto* const data = static_cast<const char*>(source);
  if (jobs_.empty() || jobs_.back().source != data) {
    jobs_.push_back({data, static_cast<int64_t>(num_bytes), 0});
  }
  outs_.push_back(static_cast<char*>(out));
  jobs_.back().outs_end = outs_.size();
}

void CopyBatch::run() const {
  const auto outs_begin = [&](int64_t i) {
    return i == 0 ? 0 : jobs_[i - 1].outs_end;
  };
  parallel_spans(
      static_cast<int64_t>(jobs_.size()),
      [&](int64_t i) {
        const auto num_outs =
            static_cast<int64_t>(jobs_[i].outs_end - outs_begin(i));
        return Work{jobs_[i].num_bytes, 1 + num_outs};
      },
      [&](int64_t i, int64_t begin, int64_t end, bool stream) {
        const Job& job = jobs_[i];
        c10::SmallVector<char*, 8> outs(
            outs_.begin() + static_cast<int64_t>(outs_begin(i)),
            outs_.begin() + static_cast<int64_t>(job.outs_end));
        for (auto& out : outs) {
          out += begin;
        }
        copy_line(job.source + begin, outs, end - begin, stream);
        if (stream) {
          end_stream();
        }
      });
}

} // namespace torchkv::kernels::cpu
