#include "copy_batch.h"

#include "cache_line.h"
#include "lines.h"
#include "parallel.h"

namespace torchkv::kernels::cpu {

void CopyBatch::add(const at::Tensor& source, const at::Tensor& out) {
  if (source.numel() == 0) {
    return; // its memory may be null
  }
  const auto* data = static_cast<const char*>(source.const_data_ptr());
  if (jobs_.empty() || jobs_.back().source != data) {
    jobs_.push_back({data, static_cast<int64_t>(source.nbytes()), 0});
  }
  outs_.push_back(static_cast<char*>(out.mutable_data_ptr()));
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
