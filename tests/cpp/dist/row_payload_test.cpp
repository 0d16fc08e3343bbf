// Rows of a key in the payloads of its slices, wherever these begin.
#include "dist/row_payload.h"

#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>
#include <string>

#include "core/row_sparse.h"

namespace torchkv::dist {
namespace {

KeySpec double_spec(std::vector<int64_t> sizes) {
  KeySpec spec;
  spec.dtype = static_cast<int32_t>(c10::kDouble);
  spec.item_bytes = 8;
  spec.total = c10::multiply_integers(sizes);
  spec.sizes = std::move(sizes);
  return spec;
}

// Slices of a key that begin at these elements.
std::vector<Place> places_at(const KeySpec& spec, std::vector<int64_t> begins) {
  begins.push_back(spec.total);
  std::vector<Place> places;
  for (size_t i = 0; i + 1 < begins.size(); ++i) {
    const auto index = static_cast<int32_t>(i);
    places.push_back({index, index, begins[i], begins[i + 1]});
  }
  return places;
}

// Ids that ascend, the rows of which lie in memory in this order.
struct Rows {
  RowSparse value;
  at::Tensor rows;
};

Rows some_rows(
    const KeySpec& spec,
    const std::vector<int64_t>& ids,
    const std::vector<int64_t>& order = {}) {
  Rows result;
  result.value.ids = at::tensor(ids, c10::kLong);
  if (!order.empty()) {
    result.value.order = at::tensor(order, c10::kLong);
  }
  const int64_t size = static_cast<int64_t>(ids.size()) * row_size(spec);
  result.rows = at::arange(1, size + 1, c10::kDouble)
                    .view({static_cast<int64_t>(ids.size()), row_size(spec)});
  return result;
}

// The cells that a payload has of a value, by their ids; repeats follow one
// another in their order.
struct Found {
  at::Tensor ids;
  at::Tensor cells;
};

Found found_in(const Blob& payload, int64_t num_cells, int64_t cell_size) {
  EXPECT_TRUE(has_form(payload, RowForm::kRows));
  const Buffers buffers;
  const at::Tensor ids = ids_in(payload, num_cells, 8 * cell_size);
  return {
      ids, cells_in(payload, ids.numel(), cell_size, c10::kDouble, buffers)};
}

TEST(RowPayloadTest, SlicesHaveTheCellsOfTheirRows) {
  struct Case {
    std::vector<int64_t> sizes;
    std::vector<int64_t> begins;
    int64_t cell_size;
  };
  for (const auto& [sizes, begins, cell] : std::vector<Case>{
           {{7}, {0}, 1},
           {{7, 2, 3}, {0}, 6},
           {{7, 6}, {0, 12, 30}, 6}, // at rows
           {{7, 6}, {0, 10, 30}, 2}, // within them
           {{7, 6}, {0, 11}, 1},
           {{7, 6}, {0, 3, 3, 9}, 3}}) { // one of them empty
    const KeySpec spec = double_spec(sizes);
    const auto places = places_at(spec, begins);
    ASSERT_EQ(cell_size(spec, places), cell);
    // Repeats of 2 are the rows 0 and 3 in memory, in this order.
    const Rows given = some_rows(spec, {1, 2, 2, 5, 6}, {1, 0, 3, 2, 4});
    const auto payloads =
        pack_rows(given.value, given.rows, spec, places, Buffers());
    ASSERT_EQ(payloads.size(), places.size());
    const at::Tensor first = at::zeros({spec.total / cell, cell}, c10::kDouble);
    const at::Tensor last = first.clone();
    for (size_t i = 0; i < places.size(); ++i) {
      const int64_t size = (places[i].end - places[i].begin) / cell;
      const Found found = found_in(payloads[i], size, cell);
      for (int64_t j = 0; j < found.ids.numel(); ++j) {
        const int64_t id =
            found.ids[j].item<int64_t>() + (places[i].begin / cell);
        last[id].copy_(found.cells[j]);
        if (first[id].eq(0).all().item<bool>()) {
          first[id].copy_(found.cells[j]);
        }
      }
    }
    const auto expect = [&](const at::Tensor& cells, int64_t repeat) {
      const at::Tensor rows = at::zeros({7, row_size(spec)}, c10::kDouble);
      const std::vector<std::pair<int64_t, int64_t>> of_rows{
          {1, 1}, {2, repeat}, {5, 2}, {6, 4}};
      for (const auto& [id, number] : of_rows) {
        rows[id].copy_(given.rows[number]);
      }
      EXPECT_TRUE(cells.view({7, row_size(spec)}).equal(rows));
    };
    expect(first, 0);
    expect(last, 3);
  }
}

TEST(RowPayloadTest, NoRows) {
  for (const auto& sizes : std::vector<std::vector<int64_t>>{{4, 3}, {4, 0}}) {
    const KeySpec spec = double_spec(sizes);
    const Rows given = some_rows(spec, {});
    const Blob payload = pack_rows(
        given.value, given.rows, spec, places_at(spec, {0}), Buffers())[0];
    EXPECT_EQ(payload.size(), 64);
    EXPECT_EQ(found_in(payload, 4, row_size(spec)).ids.numel(), 0);
  }
}

TEST(RowPayloadTest, OtherPayloadsAreRefused) {
  const KeySpec spec = double_spec({4, 3});
  const Rows given = some_rows(spec, {1, 3});
  const Blob payload = pack_rows(
      given.value, given.rows, spec, places_at(spec, {0}), Buffers())[0];
  EXPECT_NO_THROW(ids_in(payload, 4, 24));
  EXPECT_THROW(ids_in(payload, 3, 24), c10::ValueError); // ids of 0 to 2
  EXPECT_THROW(ids_in(payload, 4, 8), c10::ValueError);
  EXPECT_THROW(
      ids_in(payload.slice(0, payload.size() - 1), 4, 24), c10::ValueError);
  const auto changed = [&](size_t at, int64_t number) {
    auto bytes = std::make_shared<std::string>(
        reinterpret_cast<const char*>(payload.data()), payload.size());
    std::memcpy(bytes->data() + at, &number, sizeof(number));
    return Blob(bytes, bytes->data(), bytes->size());
  };
  EXPECT_NO_THROW(ids_in(changed(16, 3), 4, 24));
  EXPECT_THROW(ids_in(changed(24, 0), 4, 24), c10::ValueError); // 1, 0
  EXPECT_THROW(ids_in(changed(16, -1), 4, 24), c10::ValueError);
  // Counts whose bytes would overflow.
  for (const int64_t count :
       {int64_t{-1}, int64_t{3}, int64_t{1} << 61, int64_t{1} << 62}) {
    EXPECT_THROW(ids_in(changed(8, count), 4, 24), c10::ValueError);
    EXPECT_THROW(ids_in(changed(8, count), 4, 0), c10::ValueError);
  }
  EXPECT_FALSE(has_form(changed(0, 0), RowForm::kRows));
  EXPECT_FALSE(has_form(payload.slice(0, 15), RowForm::kRows));
}

TEST(RowPayloadTest, RowsOfARowSparseKeyAreSpreadByTheirIds) {
  KeySpec spec = double_spec({int64_t{1} << 50, 2, 3});
  spec.total = 0;
  spec.row_init = RowInit();
  ASSERT_EQ(row_size(spec), 6);
  const std::vector<Place> places = place("w", spec, 3, 1 << 16);
  ASSERT_EQ(places.size(), 3);
  const std::vector<int64_t> ids{7, int64_t{1} << 49, 0, 5, 3, 12};
  const std::vector<int64_t> order{5, 0, 1, 2, 3, 4};
  const Rows given = some_rows(spec, ids, order);
  const auto payloads =
      pack_rows(given.value, given.rows, spec, places, Buffers());
  const auto asked =
      pack_ids(RowForm::kForgotten, given.value.ids, spec, places, Buffers());
  int64_t count = 0;
  for (size_t slice = 0; slice < 3; ++slice) {
    const at::Tensor found =
        ids_in(payloads[slice], spec.sizes[0], 48, IdOrder::kDistinct);
    EXPECT_EQ(number_in(asked[slice]), found.numel());
    EXPECT_TRUE(has_form(asked[slice], RowForm::kForgotten));
    const at::Tensor rows =
        cells_in(payloads[slice], found.numel(), 6, c10::kDouble, Buffers());
    size_t last = 0; // in the order given
    for (int64_t j = 0; j < found.numel(); ++j) {
      const auto id = found[j].item<int64_t>();
      EXPECT_EQ(slice_of_row(id, 3), slice);
      const auto at = static_cast<size_t>(
          std::find(ids.begin(), ids.end(), id) - ids.begin());
      ASSERT_LT(at, ids.size());
      EXPECT_TRUE(j == 0 || at > last);
      last = at;
      EXPECT_TRUE(rows[j].equal(given.rows[order[at]]));
      ++count;
    }
  }
  EXPECT_EQ(count, 6);
}

TEST(RowPayloadTest, StoredRowsAreDistinctInAnyOrder) {
  KeySpec spec = double_spec({100, 1});
  spec.total = 0;
  spec.row_init = RowInit();
  const auto packed = [&](const std::vector<int64_t>& ids) {
    const Rows given = some_rows(spec, ids);
    return pack_rows(
        given.value, given.rows, spec, std::vector<Place>(1), Buffers())[0];
  };
  EXPECT_NO_THROW(ids_in(packed({9, 3, 5}), 100, 8, IdOrder::kDistinct));
  EXPECT_THROW(ids_in(packed({9, 3, 5}), 100, 8), c10::ValueError);
  EXPECT_THROW(
      ids_in(packed({9, 3, 9}), 100, 8, IdOrder::kDistinct), c10::ValueError);
  EXPECT_THROW(
      ids_in(packed({9, 3, 5}), 9, 8, IdOrder::kDistinct), c10::ValueError);
}

TEST(RowPayloadTest, QueriesOfIds) {
  const Blob payload = pack_ids_query(5, 12, Buffers());
  EXPECT_TRUE(has_form(payload, RowForm::kIds));
  EXPECT_FALSE(has_form(payload, RowForm::kRows));
  EXPECT_EQ(begin_in(payload), 5);
  EXPECT_EQ(number_in(payload), 12);
  EXPECT_EQ(begin_in(payload.slice(0, 23)), -1);
  const Blob count = pack_count_query(Buffers());
  EXPECT_TRUE(has_form(count, RowForm::kCount));
  EXPECT_EQ(begin_in(count), -1);
}

} // namespace
} // namespace torchkv::dist
