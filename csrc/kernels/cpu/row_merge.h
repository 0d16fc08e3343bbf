#pragma once

#include <c10/util/SmallVector.h>

#include <algorithm>
#include <array>
#include <cstdint>

#include "cache_line.h"
#include "row_sums.h"
#include "row_window.h"

namespace torchkv::kernels::cpu {

// Rows that follow one another in the stored value and in all sources that have
// them.
struct RowLine {
  int64_t begin = 0; // elements of the value
  int64_t end = 0;
  c10::SmallVector<const char*, 8> sources; // from the first element
};

// Merges the rows of a job's sources by id, and passes them on as lines, a few
// lines late, so that their memory is on its way into the cache.
template <class Process>
class RowMerge {
 public:
  RowMerge(const RowSumBatch::Job& job, Process& process)
      : job_(job),
        process_(process),
        cursors_(job.sources.size()),
        window_(job) {}

  // The rows [first, last).
  void run(int64_t first, int64_t last) {
    for (size_t k = 0; k < cursors_.size(); ++k) {
      const RowSource& source = job_.sources[k];
      const auto* const end = source.ids + source.num_ids;
      const int64_t begin =
          std::lower_bound(source.ids, end, first) - source.ids;
      cursors_[k] = {
          begin, begin, std::lower_bound(source.ids, end, last) - source.ids};
    }
    for (int64_t row = first; row < last;) {
      const int64_t id = next_id(last);
      if (job_.has_all_rows && row < id) {
        collect(row);
        add(row, id, found_);
      }
      row = id + 1;
      if (id < last) {
        collect(id);
        const int64_t more = num_rows_alike(id, last);
        add(id, row + more, found_);
        row += more;
        if (more == 0 && !job_.has_all_rows) {
          add_window(last);
        }
      }
    }
  }
  // Processes what has been passed on. Once, at the end.
  void flush() {
    for (; num_processed_ < num_lines_; ++num_processed_) {
      process_(lines_[num_processed_ % kLate]);
    }
  }

 private:
  static constexpr size_t kLate = 8;
  int64_t next_id(int64_t last) const {
    int64_t id = last;
    for (size_t k = 0; k < cursors_.size(); ++k) {
      if (cursors_[k].next < cursors_[k].end) {
        id = std::min(id, job_.sources[k].ids[cursors_[k].next]);
      }
    }
    return id;
  }

  // How many rows after `id`, whose sources were just collected, have the same
  // sources in the order of memory; moves past them.
  int64_t num_rows_alike(int64_t id, int64_t last) {
    int64_t count = last - id - 1;
    for (size_t k = 0; k < cursors_.size() && count != 0; ++k) {
      const RowSource& source = job_.sources[k];
      const RowCursor& at = cursors_[k];
      if (source.is_dense) {
        continue;
      }
      const bool has_id = at.next != at.begin && source.ids[at.next - 1] == id;
      if (!has_id) {
        count = at.next == at.end
            ? count
            : std::min(count, source.ids[at.next] - id - 1);
      } else if (source.order != nullptr || !source.is_distinct) {
        return 0;
      } else {
        count = num_consecutive(
            source.ids + at.next, std::min(count, at.end - at.next), id);
      }
    }
    for (size_t k = 0; k < cursors_.size() && count != 0; ++k) {
      RowCursor& at = cursors_[k];
      if (at.next != at.begin && job_.sources[k].ids[at.next - 1] == id) {
        at.next += count;
      }
    }
    return count;
  }

  // How many of the first `count` distinct ids are id + 1, id + 2, ...
  static int64_t num_consecutive(
      const int64_t* ids,
      int64_t count,
      int64_t id) {
    int64_t known = 0;
    for (int64_t step = 1; known < count; step *= 2) {
      const int64_t next = std::min(known + step, count);
      if (ids[next - 1] != id + next) {
        count = next - 1;
        break;
      }
      known = next;
    }
    while (known < count) {
      const int64_t middle = known + (count - known + 1) / 2;
      if (ids[middle - 1] == id + middle) {
        known = middle;
      } else {
        count = middle - 1;
      }
    }
    return known;
  }

  // The sources of a row, from its first element in `stored`; moves past it.
  void collect(int64_t id) {
    found_.clear();
    const int64_t row_begin = id * job_.row_size;
    const int64_t skipped = std::max(job_.begin - row_begin, int64_t{0});
    for (size_t k = 0; k < cursors_.size(); ++k) {
      const RowSource& source = job_.sources[k];
      if (source.is_dense) {
        found_.push_back(
            source.data +
            (row_begin + skipped - job_.begin) * job_.source_size);
        continue;
      }
      for (RowCursor& at = cursors_[k];
           at.next < at.end && source.ids[at.next] == id;
           ++at.next) {
        const int64_t row =
            source.order == nullptr ? at.next : source.order[at.next];
        found_.push_back(
            source.data + (row * job_.row_size + skipped) * job_.source_size);
        if (source.order != nullptr && at.next + kAhead < at.end) {
          fetch(
              source.data +
              source.order[at.next + kAhead] * job_.row_size *
                  job_.source_size);
        }
      }
    }
  }

  TORCHKV_PREFETCHES void fetch(const char* row) const {
    prefetch_row(row, job_.row_size * job_.source_size);
  }

  // The next rows, below `last`.
  void add_window(int64_t last) {
    const auto rows = window_.take(cursors_, last);
    for (size_t i = 0; i < rows.size();) {
      const int64_t id = rows[i].id;
      found_.clear();
      for (; i < rows.size() && rows[i].id == id; ++i) {
        if (i + kAhead < rows.size()) {
          fetch(rows[i + kAhead].data);
        }
        found_.push_back(rows[i].data);
      }
      add(id, id + 1, found_);
    }
  }

  // Rows [first, last), with these sources: a line, or more of the last.
  void add(int64_t first, int64_t last, c10::ArrayRef<const char*> sources) {
    const int64_t begin = std::max(first * job_.row_size, job_.begin);
    const int64_t end = std::min(last * job_.row_size, job_.end);
    if (num_lines_ != num_processed_) {
      RowLine& previous = lines_[(num_lines_ - 1) % kLate];
      const int64_t gap = (begin - previous.begin) * job_.source_size;
      if (previous.end == begin &&
          std::equal(
              sources.begin(),
              sources.end(),
              previous.sources.begin(),
              previous.sources.end(),
              [gap](const char* source, const char* of_previous) {
                return source == of_previous + gap;
              })) {
        previous.end = end;
        return;
      }
    }
    if (num_lines_ - num_processed_ == kLate) {
      process_(lines_[num_processed_++ % kLate]);
    }
    RowLine& line = lines_[num_lines_++ % kLate];
    line.begin = begin;
    line.end = end;
    line.sources.assign(sources.begin(), sources.end());
    process_.prefetch(line);
  }

  static constexpr int64_t kAhead = 2 * kLate; // entries of a source

  const RowSumBatch::Job& job_;
  Process& process_;
  c10::SmallVector<RowCursor, 8> cursors_;
  RowWindow window_;
  c10::SmallVector<const char*, 8> found_;
  std::array<RowLine, kLate> lines_; // those numbered from num_processed_
  size_t num_processed_ = 0;
  size_t num_lines_ = 0;
};

} // namespace torchkv::kernels::cpu
