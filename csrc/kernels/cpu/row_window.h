#pragma once

#include <c10/macros/Macros.h>
#include <c10/util/ArrayRef.h>
#include <c10/util/SmallVector.h>

#include <algorithm>
#include <array>
#include <cstdint>
#include <utility>

#include "row_sums.h"

namespace torchkv::kernels::cpu {

// The rows of a source that have not been merged yet.
struct RowCursor {
  int64_t begin = 0; // in the source's ids
  int64_t next = 0;
  int64_t end = 0;
};

// A row of a source, from its first element in RowSumBatch::Job::stored.
struct SourceRow {
  int64_t id;
  const char* data;
};

// Merges the next rows of a job's sources by id, a few hundred at once. Which
// source has the next row is random where rows are few and far between, and a
// branch for it is mispredicted: this merge selects instead.
class RowWindow {
 public:
  explicit RowWindow(const RowSumBatch::Job& job)
      : job_(job),
        num_of_source_(kRows / static_cast<int64_t>(job.sources.size())) {
    ends_.reserve(job.sources.size());
  }
  C10_DISABLE_COPY_AND_ASSIGN(RowWindow);

  // Rows below `last`, those of one id in the order of their sources, and all
  // of an id or none; moves past them. None if a source repeats the next id too
  // often, or with more sources than kRows. Valid until the next call.
  // REQUIRES: no dense source.
  c10::ArrayRef<SourceRow> take(
      c10::SmallVectorImpl<RowCursor>& cursors,
      int64_t last) {
    const int64_t end = end_of_next(cursors, last);
    SourceRow* to = rows_;
    ends_.clear();
    for (size_t k = 0; k < cursors.size(); ++k) {
      SourceRow* const from = to;
      to = copy(job_.sources[k], cursors[k], end, to);
      if (to != from) {
        ends_.push_back(to - rows_);
      }
    }
    const auto num_rows = static_cast<size_t>(to - rows_);
    while (ends_.size() > 1) {
      merge_pairs();
    }
    return {rows_, num_rows};
  }

 private:
  static constexpr int64_t kRows = 256;

  // The id below which no source has more than num_of_source_ rows.
  int64_t end_of_next(c10::ArrayRef<RowCursor> cursors, int64_t last) const {
    for (size_t k = 0; k < cursors.size(); ++k) {
      const int64_t next = cursors[k].next + num_of_source_;
      if (next < cursors[k].end) {
        last = std::min(last, job_.sources[k].ids[next]);
      }
    }
    return last;
  }

  // Copies the rows of a source with ids below `end`. Returns the end of them.
  SourceRow* copy(
      const RowSource& source,
      RowCursor& at,
      int64_t end,
      SourceRow* to) const {
    const int64_t row_bytes = job_.row_size * job_.source_size;
    for (; at.next < at.end && source.ids[at.next] < end; ++at.next) {
      const int64_t id = source.ids[at.next];
      const int64_t row =
          source.order == nullptr ? at.next : source.order[at.next];
      const int64_t skipped =
          std::max(job_.begin - id * job_.row_size, int64_t{0});
      *to++ = {id, source.data + row * row_bytes + skipped * job_.source_size};
    }
    return to;
  }

  // Merges each two parts of rows_ that follow one another.
  void merge_pairs() {
    int64_t begin = 0;
    size_t num_ends = 0;
    for (size_t i = 0; i < ends_.size(); i += 2) {
      const int64_t middle = ends_[i];
      const int64_t end = i + 1 < ends_.size() ? ends_[i + 1] : middle;
      merge(rows_ + begin, rows_ + middle, rows_ + end, merged_ + begin);
      ends_[num_ends++] = begin = end;
    }
    ends_.resize(num_ends);
    std::swap(rows_, merged_);
  }

  // Merges [first, middle) and [middle, end); equal ids in this order.
  static void merge(
      const SourceRow* first,
      const SourceRow* middle,
      const SourceRow* end,
      SourceRow* to) {
    const SourceRow* second = middle;
    while (first != middle && second != end) {
      const bool is_second = second->id < first->id;
      *to++ = *(is_second ? second : first);
      second += static_cast<int64_t>(is_second);
      first += static_cast<int64_t>(!is_second);
    }
    to = std::copy(first, middle, to);
    std::copy(second, end, to);
  }

  const RowSumBatch::Job& job_;
  const int64_t num_of_source_;
  // No memory is allocated in the midst of a step, which must not fail.
  std::array<std::array<SourceRow, kRows>, 2> buffers_;
  SourceRow* rows_ = buffers_[0].data();
  SourceRow* merged_ = buffers_[1].data();
  c10::SmallVector<int64_t, 8> ends_; // of the parts of rows_ in order
};

} // namespace torchkv::kernels::cpu
