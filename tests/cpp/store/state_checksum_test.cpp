// The checksum of a store's state: everything in it counts.
#include "store/state.h"

#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <cstdint>
#include <cstring>
#include <string>
#include <utility>
#include <vector>

namespace torchkv {
namespace {

StoreState make_state() {
  Optimizer optimizer =
      make_optimizer("test", "adam", {{"lr", 0.5}, {"rescale_grad", 0.25}});
  optimizer.keys[1] = {0, 0.5, 1};
  optimizer.keys[2] = {0, 2, 1};
  KeyState state{
      3, 0, {{"exp_avg", at::ones(3)}, {"exp_avg_sq", at::full(3, 2.)}}};
  StoreState result{
      "local",
      "int",
      {1, 2},
      {},
      {at::arange(3, at::kFloat), at::arange(6, at::kDouble).view({2, 3})},
      {4, 5},
      {},
      optimizer,
      {state, KeyState()},
      Compression{{make_codec("op", "2bit", {}), Codec()}, {{Key(2), 1}}},
      {{at::ones(3)}, {}},
      {7, 0}};
  result.rows[1] = {
      at::tensor({5, 3}, at::kLong), 10, make_row_init("op", "normal", {}, 3)};
  return result;
}

TEST(ChecksumTest, EqualStatesHaveEqualChecksums) {
  EXPECT_EQ(make_state().checksum(), make_state().checksum());
  // For any memory layout.
  StoreState strided = make_state();
  strided.values[1] = strided.values[1].t().contiguous().t();
  EXPECT_EQ(strided.checksum(), make_state().checksum());
}

// Each bit of each tensor.
TEST(ChecksumTest, OneFlippedBitChangesIt) {
  const int64_t expected = make_state().checksum();
  const auto flip_each = [&](auto tensor_of) {
    StoreState state = make_state();
    const at::Tensor tensor = tensor_of(state);
    auto* bytes = static_cast<uint8_t*>(tensor.mutable_data_ptr());
    for (size_t i = 0; i < tensor.nbytes(); ++i) {
      for (int bit = 0; bit < 8; ++bit) {
        bytes[i] ^= 1U << bit;
        EXPECT_NE(state.checksum(), expected) << i << ' ' << bit;
        bytes[i] ^= 1U << bit;
      }
    }
    EXPECT_EQ(state.checksum(), expected);
  };
  flip_each([](auto& state) { return state.values[0]; });
  flip_each([](auto& state) { return state.values[1]; });
  flip_each([](auto& state) { return state.residuals[0][0]; });
  flip_each([](auto& state) { return state.states[0].tensors.at("exp_avg"); });
  flip_each([](auto& state) { return state.rows[1].ids; });
}

TEST(ChecksumTest, EveryOtherPartChangesIt) {
  const int64_t expected = make_state().checksum();
  const auto differs = [&](auto change) {
    StoreState state = make_state();
    change(state);
    return state.checksum() != expected;
  };
  EXPECT_FALSE(differs([](auto&) {}));
  EXPECT_TRUE(differs([](auto& s) { s.type = "device"; }));
  EXPECT_TRUE(differs([](auto& s) { s.int_keys = {1, 3}; }));
  EXPECT_TRUE(differs([](auto& s) { s.str_keys = {"a"}; }));
  EXPECT_TRUE(differs([](auto& s) { s.versions[0] = 5; }));
  EXPECT_TRUE(differs([](auto& s) { s.compression.reset(); }));
  EXPECT_TRUE(differs([](auto& s) { s.compression->groups[0].threshold = 1; }));
  EXPECT_TRUE(differs([](auto& s) { s.compression->keys[Key(2)] = 0; }));
  EXPECT_TRUE(differs([](auto& s) { s.num_compressed[1] = 1; }));
  EXPECT_TRUE(
      differs([](auto& s) { std::swap(s.residuals[0], s.residuals[1]); }));
  EXPECT_TRUE(differs([](auto& s) { std::swap(s.values[0], s.values[1]); }));
  EXPECT_TRUE(differs([](auto& s) { s.values[1] = s.values[1].view(6); }));
  EXPECT_TRUE(
      differs([](auto& s) { s.values[0] = s.values[0].view(at::kInt); }));
  EXPECT_TRUE(differs([](auto& s) { s.updater.push_back(at::empty(0)); }));
  EXPECT_TRUE(differs([](auto& s) { s.optimizer.reset(); }));
  EXPECT_TRUE(differs([](auto& s) { s.optimizer->groups[0].lr = 0.25; }));
  EXPECT_TRUE(differs([](auto& s) { s.optimizer->gradient.max_norm = 1; }));
  EXPECT_TRUE(differs([](auto& s) { s.optimizer->keys[2].wd_mult = 3; }));
  EXPECT_TRUE(differs([](auto& s) { s.optimizer->keys[3] = {}; }));
  EXPECT_TRUE(differs([](auto& s) { s.rows.clear(); }));
  EXPECT_TRUE(differs([](auto& s) { s.rows[0] = s.rows[1]; }));
  EXPECT_TRUE(differs([](auto& s) { s.rows[1].num_rows.reset(); }));
  EXPECT_TRUE(differs([](auto& s) { s.rows[1].init.std = 2; }));
  EXPECT_TRUE(differs([](auto& s) { s.rows[1].init.seed = 2; }));
  EXPECT_TRUE(
      differs([](auto& s) { s.rows[1].init.id = RowInit::Id::kZeros; }));
  EXPECT_TRUE(differs([](auto& s) { s.states[0].step = 4; }));
  EXPECT_TRUE(differs([](auto& s) { s.states[1].num_accumulated = 1; }));
  EXPECT_TRUE(differs([](auto& s) {
    auto& tensors = s.states[0].tensors;
    std::swap(tensors.at("exp_avg"), tensors.at("exp_avg_sq"));
  }));
}

// As in zlib and zip files.
TEST(ChecksumTest, IsCrc32) {
  StoreState state;
  state.type = "123456789";
  // Each string and list is preceded by its size.
  std::string bytes;
  const auto add = [&](uint64_t size) {
    bytes.append(reinterpret_cast<const char*>(&size), sizeof(size));
  };
  add(9);
  bytes += state.type;
  for (int i = 0; i < 6; ++i) { // empty fields
    add(0);
  }
  uint32_t crc = 0xFFFFFFFF;
  for (const char byte : bytes) {
    crc ^= static_cast<uint8_t>(byte);
    for (int bit = 0; bit < 8; ++bit) {
      crc = (crc >> 1) ^ ((crc & 1) != 0 ? 0xEDB88320U : 0);
    }
  }
  EXPECT_EQ(state.checksum(), static_cast<int64_t>(~crc & 0xFFFFFFFFU));
}

} // namespace
} // namespace torchkv
