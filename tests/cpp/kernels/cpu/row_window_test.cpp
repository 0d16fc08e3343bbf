// The merge of rows by id against a sort.
#include "kernels/cpu/row_window.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <random>
#include <utility>
#include <vector>

namespace torchkv {
namespace {

using kernels::cpu::RowCursor;
using kernels::cpu::RowSource;
using kernels::cpu::RowSumBatch;
using kernels::cpu::RowWindow;

constexpr int64_t kRowSize = 3; // of one byte each
constexpr int64_t kFirst = 5; // the job's part begins within this row
constexpr int64_t kSkipped = 2;

class RowWindowTest : public ::testing::Test {
 protected:
  RowWindowTest() {
    job_.row_size = kRowSize;
    job_.source_size = 1;
    job_.begin = kFirst * kRowSize + kSkipped;
  }

  // Adds a source with these ids, in any order, counted from kFirst.
  void add_source(const std::vector<int64_t>& ids, bool has_order) {
    std::vector<std::pair<int64_t, int64_t>> rows;
    rows.reserve(ids.size());
    for (const int64_t id : ids) {
      rows.emplace_back(kFirst + id, static_cast<int64_t>(rows.size()));
    }
    std::sort(rows.begin(), rows.end());
    auto& sorted = ids_.emplace_back();
    auto& order = orders_.emplace_back();
    for (const auto& [id, row] : rows) {
      sorted.push_back(id);
      order.push_back(row);
    }
    RowSource& source = job_.sources.emplace_back();
    source.data = data_.data() + 10'000 * ids_.size();
    source.num_ids = static_cast<int64_t>(ids.size());
    for (size_t i = 0; i < rows.size(); ++i) {
      const int64_t row = has_order ? order[i] : static_cast<int64_t>(i);
      const int64_t skipped = sorted[i] == kFirst ? kSkipped : 0;
      expected_.emplace_back(sorted[i], source.data + row * kRowSize + skipped);
    }
    has_order_.push_back(has_order);
  }
  void add_random_source(int64_t num_rows, size_t count, bool has_order) {
    std::vector<int64_t> ids(count);
    for (int64_t& id : ids) {
      id = std::uniform_int_distribution<int64_t>(0, num_rows - 1)(random_);
    }
    add_source(ids, has_order);
  }

  // Takes rows below `last` until there is none, and returns in how many
  // windows they were.
  int64_t expect_merged(int64_t last) {
    c10::SmallVector<RowCursor, 8> cursors;
    for (size_t k = 0; k < ids_.size(); ++k) {
      job_.sources[k].ids = ids_[k].data();
      job_.sources[k].order = has_order_[k] ? orders_[k].data() : nullptr;
      const auto end = std::lower_bound(ids_[k].begin(), ids_[k].end(), last);
      cursors.push_back({0, 0, end - ids_[k].begin()});
    }
    // Rows of one id follow one another in memory, and so do the sources.
    std::sort(expected_.begin(), expected_.end());
    const auto is_below = [last](const auto& row) { return row.first < last; };
    expected_.erase(
        std::find_if_not(expected_.begin(), expected_.end(), is_below),
        expected_.end());
    RowWindow window(job_);
    size_t num_taken = 0;
    int64_t num_windows = 0;
    while (num_taken < expected_.size()) {
      const auto rows = window.take(cursors, last);
      if (rows.empty()) {
        break;
      }
      ++num_windows;
      for (const auto& row : rows) {
        if (num_taken == expected_.size()) {
          ADD_FAILURE() << "more rows than there are";
          return num_windows;
        }
        EXPECT_EQ(row.id, expected_[num_taken].first);
        EXPECT_EQ(row.data, expected_[num_taken].second);
        ++num_taken;
      }
      const bool is_cut = num_taken < expected_.size() &&
          expected_[num_taken].first == rows.back().id;
      EXPECT_FALSE(is_cut) << "in the midst of the rows of an id";
    }
    num_taken_ = num_taken;
    return num_windows;
  }

  size_t num_rows() const {
    return expected_.size();
  }

  std::mt19937_64 random_{1}; // NOLINT(bugprone-random-generator-seed)
  RowSumBatch::Job job_;
  size_t num_taken_ = 0;

 private:
  std::vector<std::vector<int64_t>> ids_;
  std::vector<std::vector<int64_t>> orders_;
  std::vector<bool> has_order_;
  std::vector<std::pair<int64_t, const char*>> expected_;
  const std::vector<char> data_ =
      std::vector<char>(3'000'000); // of all sources
};

TEST_F(RowWindowTest, MergesAnyNumberOfSources) {
  for (size_t k = 0; k < 41; ++k) {
    add_random_source(100'000, 37 * k, /*has_order=*/k % 2 == 1);
    expect_merged(kFirst + 100'000);
    EXPECT_EQ(num_taken_, num_rows()) << k;
  }
}

TEST_F(RowWindowTest, TakesNothingOfTooManySources) {
  for (size_t k = 0; k < 257; ++k) {
    add_source({1, 2}, /*has_order=*/false);
  }
  EXPECT_EQ(expect_merged(kFirst + 10), 0);
}

TEST_F(RowWindowTest, TakesRowsOfOneSourceInItsOrder) {
  add_random_source(10'000, 3'000, /*has_order=*/true);
  EXPECT_GE(expect_merged(kFirst + 10'000), 3'000 / 256);
  EXPECT_EQ(num_taken_, 3'000);
}

TEST_F(RowWindowTest, StopsAtTheLastRow) {
  for (int64_t k = 0; k < 3; ++k) {
    add_random_source(1'000, 900, /*has_order=*/false);
  }
  EXPECT_GT(expect_merged(kFirst + 500), 0);
  EXPECT_EQ(num_taken_, num_rows());
  EXPECT_LT(num_taken_, 2'000);
}

TEST_F(RowWindowTest, SkipsTheColumnsBeforeThePart) {
  add_source({0, 1, 0}, /*has_order=*/true);
  add_source({0}, /*has_order=*/false);
  EXPECT_EQ(expect_merged(kFirst + 2), 1);
  EXPECT_EQ(num_taken_, 4);
}

TEST_F(RowWindowTest, TakesNothingOfAnIdRepeatedTooOften) {
  add_source({1, 2}, /*has_order=*/false);
  std::vector<int64_t> ids(1'000, 3);
  add_source(ids, /*has_order=*/true);
  add_source({3, 4}, /*has_order=*/false);
  EXPECT_EQ(expect_merged(kFirst + 10), 1);
  EXPECT_EQ(num_taken_, 2); // ids 1 and 2
}

} // namespace
} // namespace torchkv
