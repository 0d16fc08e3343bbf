// Some rows of a value, from each of its slices.
#include "dist/row_query.h"

#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <cstring>
#include <memory>
#include <vector>

#include "dist/row_payload.h"

namespace torchkv::dist {
namespace {

struct Scene {
  explicit Scene(std::vector<int64_t> sizes) {
    spec.dtype = static_cast<int32_t>(c10::kFloat);
    spec.total = c10::multiply_integers(sizes);
    spec.sizes = std::move(sizes);
    config.num_servers = 3;
    config.split_bytes = 256;
    config.piece_bytes = 100; // not a multiple of a row
    places = place("w", spec, config.num_servers, config.split_bytes);
    value = at::arange(spec.total, c10::kFloat);
  }
  // In pieces that do not follow one another in memory.
  ValuePtr slice(const Place& place) const {
    auto result = std::make_shared<Value>();
    const at::Tensor part = value.slice(0, place.begin, place.end);
    for (const Blob& piece : cut(blob_of(part), config.piece_bytes)) {
      const auto size = static_cast<int64_t>(piece.size());
      const at::Tensor copy = at::empty({size}, c10::kByte);
      if (size != 0) {
        std::memcpy(copy.mutable_data_ptr(), piece.data(), piece.size());
      }
      result->pieces.push_back(blob_of(copy));
    }
    return result;
  }
  ValuePtr select(const Place& place, const Blobs& query) const {
    return select_rows(
        {"w", place.index}, spec, *slice(place), query, config, Buffers());
  }

  KeySpec spec;
  Config config;
  std::vector<Place> places;
  at::Tensor value;
};

TEST(RowQueryTest, AnswersAreTheRows) {
  for (const auto& sizes : std::vector<std::vector<int64_t>>{
           {5}, {300}, {300, 7}, {200, 2, 5}, {5, 300}, {33, 80}, {4, 0}}) {
    const Scene scene(sizes);
    for (const auto& ids : std::vector<std::vector<int64_t>>{
             {0}, {1, 3}, {}, {0, 1, 2, 3}, {sizes[0] - 1}}) {
      const at::Tensor wanted = at::tensor(ids, c10::kLong);
      const auto queries =
          make_queries(wanted, scene.spec, scene.places, Buffers());
      ASSERT_EQ(queries.size(), scene.places.size());
      Blobs pieces;
      for (size_t i = 0; i < queries.size(); ++i) {
        const ValuePtr answer =
            scene.select(scene.places[i], cut(queries[i].payload, 40));
        ASSERT_NE(answer, nullptr);
        size_t num_bytes = 0;
        for (const Blob& piece : answer->pieces) {
          num_bytes += piece.size();
          pieces.push_back(piece);
        }
        EXPECT_EQ(num_bytes, queries[i].answer_bytes);
      }
      const at::Tensor all = scene.value.view(sizes);
      const at::Tensor rows = all.index_select(0, wanted);
      const at::Tensor found =
          tensor_of(pieces, rows.sizes(), c10::kFloat, Buffers());
      EXPECT_TRUE(found.equal(rows)) << rows.sizes();
    }
  }
}

TEST(RowQueryTest, OtherQueriesAreRefused) {
  const Scene scene({300, 7});
  const Place& first = scene.places[0];
  const auto query = [&](const std::vector<int64_t>& ids) {
    return Blobs{pack_ids(
        RowForm::kRows,
        at::tensor(ids, c10::kLong),
        scene.spec,
        {Place{0, 0, 0, scene.spec.total}},
        Buffers())[0]};
  };
  const int64_t num_rows = (first.end - first.begin) / 7;
  EXPECT_NE(scene.select(first, query({0, num_rows - 1})), nullptr);
  EXPECT_EQ(scene.select(first, query({0, num_rows})), nullptr);
  EXPECT_EQ(scene.select(first, query({3, 3})), nullptr);
  const Blob good = query({1})[0];
  EXPECT_EQ(scene.select(first, {good.slice(0, 63)}), nullptr);
  EXPECT_EQ(scene.select(first, {good.slice(0, 3)}), nullptr);
  EXPECT_EQ(scene.select(first, {Blob()}), nullptr);
  const Blob codes = blob_of(at::zeros({64}, c10::kByte));
  EXPECT_EQ(scene.select(first, {codes}), nullptr);
}

} // namespace
} // namespace torchkv::dist
