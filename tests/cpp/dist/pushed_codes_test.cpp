// Codes that pushes bring, in pieces or not, and other bytes in their place.
#include "dist/pushed_codes.h"

#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include "core/compressed.h"
#include "dist/pack_value.h"

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

Round pushed_round(const std::vector<Blobs>& pushed) {
  Round round;
  round.num_elements = kSize;
  for (const auto& pieces : pushed) {
    auto& push = round.pushes.emplace_back();
    push.is_encoded = true;
    push.pieces = pieces;
  }
  return round;
}

TEST(PushedCodesTest, PiecesAreJoined) {
  const Blob whole = codes();
  Round round = pushed_round({cut(whole, 100), {whole}});
  ASSERT_GT(round.pushes[0].pieces.size(), 1);
  join_codes(round, Buffers());
  Tensors values;
  for (const auto& push : round.pushes) {
    ASSERT_EQ(push.pieces.size(), 1);
    append_codes(push, kSize, kSize, values);
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

TEST(PushedCodesTest, OtherBytesAreRefused) {
  const Blob whole = codes();
  Round cut_short = pushed_round(
      std::vector<Blobs>{{whole}, {whole.slice(0, whole.size() - 4)}});
  EXPECT_FALSE(can_join_codes(cut_short, Buffers()));
  EXPECT_THROW(join_codes(cut_short, Buffers()), c10::ValueError);
  Round another_size = pushed_round(std::vector<Blobs>{{whole}});
  another_size.num_elements = kSize - 1;
  EXPECT_FALSE(can_join_codes(another_size, Buffers()));
  Round elements = pushed_round(std::vector<Blobs>{{whole.slice(0, 3)}});
  elements.pushes[0].is_encoded = false;
  EXPECT_TRUE(can_join_codes(elements, Buffers()));
}

// Blocks of codes are used again, although their sizes vary.
TEST(PushedCodesTest, SimilarSizesHaveOneBlock) {
  const Buffers buffers;
  const void* const first = buffers.empty_codes(100'000).const_data_ptr();
  EXPECT_EQ(buffers.empty_codes(99'000).const_data_ptr(), first);
  EXPECT_EQ(buffers.empty_codes(101'234).numel(), 101'234);
  EXPECT_EQ(buffers.empty_codes(0).numel(), 0);
}

} // namespace
} // namespace torchkv::dist
