// Updates of several slices at once.
#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <future>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "dist/applier.h"
#include "dist/update_spec.h"
#include "function_updater.h"
#include "recording_runtime.h"

namespace torchkv::dist {
namespace {

using Floats = std::vector<float>;

struct FirstValue final : Value {
  std::vector<ValuePtr> parts;

  ValuePtr part(size_t i) const override {
    return parts[i];
  }
};

// A list of keys of one, two and three floats, which begin with zeros.
struct ApplierListsTest : ::testing::Test {
  ApplierListsTest() {
    auto made = std::make_shared<std::vector<RoundPart>>();
    auto first = std::make_shared<FirstValue>();
    int64_t begin = 0;
    for (const int64_t size : {1, 2, 3}) {
      auto spec = std::make_shared<KeySpec>();
      spec->total = size;
      spec->sizes = {size};
      spec->dtype = static_cast<int32_t>(c10::kFloat);
      made->push_back({{Key(size), 0}, std::move(spec), begin, size});
      begin += size;
      auto value = std::make_shared<StoredValue>();
      value->pieces.push_back(blob_of(at::zeros({size})));
      first->parts.push_back(std::move(value));
    }
    parts = std::move(made);
    value = std::move(first);
  }

  // A round of these pushes, one after the other.
  RoundPtr round(const std::vector<at::Tensor>& pushes, int64_t gen = 0) {
    auto result = std::make_shared<Round>();
    result->slice = {Key(1), SliceId::kList};
    auto spec = std::make_shared<KeySpec>(*(*parts)[0].spec);
    spec->total = 6;
    result->spec = std::move(spec);
    result->parts = parts;
    result->num_elements = 6;
    result->kid = 1;
    result->gen = gen;
    result->options = options;
    result->source = value;
    for (const auto& pushed : pushes) {
      Push& push = result->pushes.emplace_back();
      push.rank = static_cast<int32_t>(result->pushes.size()) - 1;
      push.dtype = static_cast<int32_t>(c10::kFloat);
      push.item_bytes = 4;
      push.pieces.push_back(blob_of(pushed));
    }
    return result;
  }
  // What the updater has thrown.
  std::optional<std::string> apply(const RoundPtr& applied) {
    done = std::promise<std::optional<std::string>>();
    applier.apply(applied);
    const auto error = done.get_future().get();
    value = applied->result;
    return error;
  }
  Floats numbers(size_t part) const {
    const Blob bytes = value->part(part)->pieces[0];
    const auto* const first = reinterpret_cast<const float*>(bytes.data());
    return {first, first + bytes.size() / sizeof(float)};
  }

  std::shared_ptr<const std::vector<RoundPart>> parts;
  ValuePtr value;
  Blob options;
  torchkv::testing::RecordingRuntime runtime;
  std::promise<std::optional<std::string>> done;
  Applier applier{
      runtime,
      nullptr,
      0,
      Config(),
      Buffers(),
      [this](const auto& finished) { done.set_value(finished[0].error); }};
};

TEST_F(ApplierListsTest, SumsAreThoseOfTheSlices) {
  for (const float factor : {1.0F, 10.0F}) { // with what is kept of the first
    const at::Tensor pushed = at::arange(6, c10::kFloat) * factor;
    const RoundPtr applied = round({pushed, pushed + 1});
    EXPECT_FALSE(apply(applied));
    EXPECT_TRUE(applied->errors.empty());
    ASSERT_EQ(value->pieces.size(), 1);
    EXPECT_EQ(numbers(0), Floats{1});
    EXPECT_EQ(numbers(1), (Floats{2 * factor + 1, 4 * factor + 1}));
    EXPECT_EQ(
        numbers(2), (Floats{6 * factor + 1, 8 * factor + 1, 10 * factor + 1}));
    EXPECT_TRUE(applied->pushes[0].pieces.empty());
  }
}

TEST_F(ApplierListsTest, APushOfAnotherSizeChangesNothing) {
  EXPECT_FALSE(apply(round({at::ones({6})})));
  const RoundPtr wrong = round({at::ones({6}), at::ones({5})});
  const auto error = apply(wrong);
  ASSERT_TRUE(error);
  EXPECT_NE(error->find("expected 24 bytes"), std::string::npos) << *error;
  EXPECT_NE(error->find("but got 20"), std::string::npos) << *error;
  EXPECT_EQ(wrong->result, wrong->source);
  EXPECT_EQ(numbers(1), (Floats{1, 1}));
  // The same bytes, but said to be of a larger dtype.
  const RoundPtr other = round({at::ones({6})});
  other->pushes[0].dtype = static_cast<int32_t>(c10::kDouble);
  EXPECT_TRUE(apply(other));
  EXPECT_EQ(numbers(1), (Floats{1, 1}));
}

TEST_F(ApplierListsTest, RankZerosPushMayReplaceTheValues) {
  EXPECT_FALSE(apply(round({at::ones({6})})));
  UpdateSpec spec;
  spec.replaces = true;
  options = encode(spec);
  EXPECT_FALSE(apply(round({at::full({6}, 3.0), at::full({6}, 4.0)}, 1)));
  EXPECT_EQ(numbers(1), (Floats{3, 3}));
}

TEST_F(ApplierListsTest, WhatAnUpdaterThrowsIsOfOneSlice) {
  applier.updates().set_python(
      1,
      torchkv::testing::updater_of(
          [](const at::Tensor& input, const at::Tensor& stored) {
            stored.add_(input);
            TORCH_CHECK(stored.numel() != 2, "of two numbers");
          }));
  UpdateSpec spec;
  spec.kind = UpdateSpec::Kind::kPython;
  spec.epoch = 1;
  options = encode(spec);
  const RoundPtr applied = round({at::ones({6}), at::ones({6})}, 1);
  EXPECT_FALSE(apply(applied));
  ASSERT_EQ(applied->errors.size(), 3);
  EXPECT_FALSE(applied->errors[0]);
  ASSERT_TRUE(applied->errors[1]);
  EXPECT_NE(applied->errors[1]->find("of two numbers"), std::string::npos);
  EXPECT_FALSE(applied->errors[2]);
  for (size_t part = 0; part < 3; ++part) { // what it has left
    EXPECT_EQ(numbers(part), Floats(part + 1, 2.0F));
  }
}

} // namespace
} // namespace torchkv::dist
