// What pushes bring that is encoded, in pieces or not, and other bytes in its
// place.
#include "dist/encoded_pushes.h"

#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include "core/compressed.h"
#include "core/row_sparse.h"
#include "dist/pack_value.h"
#include "dist/row_payload.h"

namespace torchkv::dist {
namespace {

constexpr int64_t kSize = 1000;

// What 2bit sends of ones, with a threshold of 0.5.
Blob codes() {
  Compression compression;
  compression.groups.push_back(make_codec("test", "2bit", {}));
  const StoreCompression of_store(compression, nullptr);
  const auto entry =
      c10::make_intrusive<Entry>(Key("w"), Meta{{kSize}, c10::kFloat, kSize});
  const Place place{0, 0, 0, kSize};
  return pack_value(
      of_store, *entry, 0, at::ones({kSize}), place, Buffers())[0];
}

std::shared_ptr<const KeySpec> float_spec(std::vector<int64_t> sizes) {
  auto spec = std::make_shared<KeySpec>();
  spec->dtype = static_cast<int32_t>(c10::kFloat);
  spec->total = c10::multiply_integers(sizes);
  spec->sizes = std::move(sizes);
  return spec;
}

// Ones in the rows of a key with these ids.
Blobs rows_of(const KeySpec& spec, const std::vector<int64_t>& ids) {
  RowSparse value;
  value.ids = at::tensor(ids, c10::kLong);
  const auto count = static_cast<int64_t>(ids.size());
  return {pack_rows(
      value,
      at::ones({count, row_size(spec)}),
      spec,
      {Place{0, 0, 0, spec.total}},
      Buffers())[0]};
}

Round pushed_round(
    const std::vector<Blobs>& pushed,
    std::vector<int64_t> sizes = {kSize}) {
  Round round;
  round.spec = float_spec(std::move(sizes));
  round.num_elements = round.spec->total;
  for (const auto& pieces : pushed) {
    auto& push = round.pushes.emplace_back();
    push.is_encoded = true;
    push.dtype = round.spec->dtype;
    push.pieces = pieces;
  }
  return round;
}

SliceShape shape_of(const Round& round) {
  return {round, Config()};
}

TEST(EncodedPushesTest, PiecesAreJoined) {
  const Blob whole = codes();
  Round round = pushed_round({cut(whole, 100), {whole}});
  ASSERT_GT(round.pushes[0].pieces.size(), 1);
  const SliceShape shape = shape_of(round);
  join_encoded(round, shape, Buffers());
  Tensors values;
  for (const auto& push : round.pushes) {
    ASSERT_EQ(push.pieces.size(), 1);
    append_push(push, shape, kSize, Buffers(), values);
  }
  values.append(at::ones({kSize}));
  ASSERT_EQ(values.flat.size(), 3);
  EXPECT_TRUE(values.flat[0].equal(values.flat[1]));
  EXPECT_EQ(values.flat[1].const_data_ptr(), whole.data()); // no copy
  for (const int64_t i : {0, 1}) {
    const Encoding* const encoding = values.value(i).encoding;
    ASSERT_NE(dynamic_cast<const Packed*>(encoding), nullptr);
    EXPECT_EQ(encoding->dtype, c10::kFloat);
    EXPECT_EQ(encoding->sizes[0], kSize);
  }
  EXPECT_NE(values.value(2).dense(), nullptr);
}

TEST(EncodedPushesTest, Rows) {
  const auto spec = float_spec({5, 2, 3});
  const Blob distinct = rows_of(*spec, {0, 3, 4})[0];
  Round round = pushed_round(
      {cut(distinct, 40), rows_of(*spec, {1, 1}), rows_of(*spec, {})},
      spec->sizes);
  const SliceShape shape = shape_of(round);
  join_encoded(round, shape, Buffers());
  Tensors values;
  for (const auto& push : round.pushes) {
    append_push(push, shape, spec->total, Buffers(), values);
  }
  const std::vector<std::vector<int64_t>> ids{{0, 3, 4}, {1, 1}, {}};
  for (size_t i = 0; i < ids.size(); ++i) {
    const RowSparse* const rows =
        rows_in(values.value(static_cast<int64_t>(i)));
    ASSERT_NE(rows, nullptr);
    EXPECT_TRUE(rows->ids.equal(at::tensor(ids[i], c10::kLong)));
    EXPECT_EQ(rows->is_distinct, i != 1);
    EXPECT_EQ(rows->dtype, c10::kFloat);
    EXPECT_EQ(c10::IntArrayRef(rows->sizes), c10::IntArrayRef({5, 2, 3}));
    EXPECT_TRUE(values.flat[i].equal(
        at::ones({static_cast<int64_t>(ids[i].size()), 2, 3})));
  }
}

// Of a key that is split, by whether slices begin at rows.
TEST(EncodedPushesTest, ShapesOfSlices) {
  struct Case {
    std::vector<int64_t> sizes;
    std::vector<int64_t> of_slice;
  };
  for (const auto& [sizes, of_slice] : std::vector<Case>{
           {{3001, 67}, {1488, 67}},
           {{33, 4096}, {33, 2048}},
           {{20, 2003}, {20016}},
           {{40060}, {20016}}}) {
    Round round = pushed_round({}, sizes);
    Config config;
    config.num_servers = 2;
    config.split_bytes = 1024;
    const auto places = place(
        round.slice.key, *round.spec, config.num_servers, config.split_bytes);
    round.num_elements = places[0].end;
    const SliceShape shape(round, config);
    EXPECT_EQ(c10::IntArrayRef(shape.sizes), c10::IntArrayRef(of_slice));
    EXPECT_EQ(shape.num_cells * shape.cell_size, round.num_elements);
  }
}

TEST(EncodedPushesTest, OtherBytesAreRefused) {
  const auto expect_refused = [](Round round) {
    EXPECT_THROW(
        join_encoded(round, shape_of(round), Buffers()), c10::ValueError);
  };
  const Blob whole = codes();
  expect_refused(pushed_round(
      std::vector<Blobs>{{whole}, {whole.slice(0, whole.size() - 4)}}));
  expect_refused(pushed_round(std::vector<Blobs>{{whole}}, {kSize - 1}));
  expect_refused(pushed_round(std::vector<Blobs>{{whole.slice(0, 3)}}));
  expect_refused(pushed_round({rows_of(*float_spec({9, 2}), {8})}, {8, 2}));
  expect_refused(pushed_round({rows_of(*float_spec({8, 2}), {7})}, {8, 3}));
  // Rows of a value without dimensions, which has one element.
  expect_refused(pushed_round({rows_of(*float_spec({1}), {0})}, {}));
}

// The server counts the bytes by what the rank says of an element's size.
TEST(EncodedPushesTest, ElementsOfAnotherSizeAreRefused) {
  const at::Tensor value = at::ones({kSize});
  Round round = pushed_round({cut(blob_of(value), 100)});
  round.pushes[0].is_encoded = false;
  const SliceShape shape = shape_of(round);
  EXPECT_NO_THROW(join_encoded(round, shape, Buffers()));
  round.pushes[0].dtype = static_cast<int32_t>(c10::kDouble);
  EXPECT_THROW(join_encoded(round, shape, Buffers()), c10::ValueError);
  Tensors values;
  EXPECT_THROW(
      append_push(round.pushes[0], shape, kSize, Buffers(), values),
      c10::ValueError);
}

// Blocks of codes are used again, although their sizes vary.
TEST(EncodedPushesTest, SimilarSizesHaveOneBlock) {
  const Buffers buffers;
  const void* const first = buffers.empty_codes(100'000).const_data_ptr();
  EXPECT_EQ(buffers.empty_codes(99'000).const_data_ptr(), first);
  EXPECT_EQ(buffers.empty_codes(101'234).numel(), 101'234);
  EXPECT_EQ(buffers.empty_codes(0).numel(), 0);
}

} // namespace
} // namespace torchkv::dist
