#include "dist/list_views.h"

#include <ATen/ops/arange.h>
#include <ATen/ops/equal.h>
#include <gtest/gtest.h>

#include "dist/buffers.h"

namespace torchkv::dist {
namespace {

std::vector<RoundPart> parts_of(
    const std::vector<std::vector<int64_t>>& shapes) {
  std::vector<RoundPart> parts;
  int64_t begin = 0;
  for (const auto& sizes : shapes) {
    auto spec = std::make_shared<KeySpec>();
    spec->sizes = sizes;
    spec->total = c10::multiply_integers(sizes);
    const int64_t total = spec->total;
    parts.push_back(
        {{Key(static_cast<int64_t>(parts.size())), 0},
         std::move(spec),
         begin,
         total});
    begin += total;
  }
  return parts;
}

TEST(ListViewsTest, TensorsAreWhereTheValuesAre) {
  ListViews views(parts_of({{2, 3}, {}, {4}}), {c10::kFloat, c10::kDouble});
  EXPECT_TRUE(views.are_of({c10::kFloat, c10::kDouble}));
  EXPECT_FALSE(views.are_of({c10::kFloat}));
  EXPECT_EQ(views.num_bytes(0), 11 * sizeof(float));
  EXPECT_EQ(views.num_bytes(1), 11 * sizeof(double));
  for (const float first : {0.0F, 100.0F}) { // the same views, other memories
    const at::Tensor floats = at::arange(first, first + 11);
    at::Tensor doubles = at::arange(0, 11, c10::kDouble);
    views.set(0, blob_of(floats));
    views.set(1, doubles.mutable_data_ptr());
    const Tensors& tensors = views.tensors();
    ASSERT_EQ(tensors.size(), 3);
    ASSERT_EQ(tensors.of(0).size(), 2);
    EXPECT_TRUE(
        at::equal(tensors.of(0)[0], floats.slice(0, 0, 6).view({2, 3})));
    EXPECT_TRUE(at::equal(tensors.of(1)[0], floats[6]));
    tensors.of(2)[1].fill_(7);
    EXPECT_EQ(doubles[6].item<double>(), 6);
    EXPECT_EQ(doubles[7].item<double>(), 7);
    EXPECT_EQ(doubles[10].item<double>(), 7);
  }
}

TEST(ListViewsTest, AMemoryIsKeptUntilItIsCleared) {
  ListViews views(parts_of({{1}, {1}}), {c10::kFloat});
  const auto owner = std::make_shared<std::vector<float>>(2);
  views.set(0, Blob(owner, owner->data(), 2 * sizeof(float)));
  EXPECT_EQ(owner.use_count(), 2);
  views.clear();
  EXPECT_EQ(owner.use_count(), 1);
}

} // namespace
} // namespace torchkv::dist
