#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "parallel.h"

namespace torchkv::kernels::cpu {

// Jobs divided into chunks of a fixed number of elements, so that a sum of
// squares per chunk has the same bits for any number of threads.
class Chunks {
 public:
  // `size`: elements of a chunk.
  explicit Chunks(int64_t size) : size_(size) {}

  void add_job(int64_t num_elements, int64_t bytes_per_element) {
    const int64_t num_chunks = (num_elements + size_ - 1) / size_;
    const int64_t size = std::clamp(num_elements, int64_t{1}, size_);
    jobs_.push_back({num_chunks, size * bytes_per_element, /*cut=*/1});
    num_elements_.push_back(num_elements);
    ends_.push_back(end(jobs_.size() - 1) + num_chunks);
  }

  // The chunks of a job are [end(job), end(job + 1)).
  int64_t end(size_t num_jobs) const {
    return ends_[num_jobs];
  }
  int64_t size() const {
    return ends_.back();
  }

  // Calls `body(job, chunk, first, size)` for each chunk, in parallel: its
  // elements are [first, first + size) of the job.
  template <class Body>
  void for_each(Body body) const {
    parallel_spans(
        static_cast<int64_t>(jobs_.size()),
        [&](int64_t job) { return jobs_[job]; },
        [&](int64_t job, int64_t begin, int64_t end, bool /*stream*/) {
          for (int64_t i = begin; i < end; ++i) {
            const int64_t first = i * size_;
            body(
                job,
                ends_[job] + i,
                first,
                std::min(size_, num_elements_[job] - first));
          }
        });
  }

 private:
  const int64_t size_;
  std::vector<Work> jobs_;
  std::vector<int64_t> num_elements_;
  std::vector<int64_t> ends_{0}; // of the chunks of the first 0, 1, ... jobs
};

} // namespace torchkv::kernels::cpu
