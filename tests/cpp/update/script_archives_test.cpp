#include "update/script_archives.h"

#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "error_text.h"

namespace torchkv {
namespace {

using testing::error_text;

at::Tensor bytes(int64_t size, int64_t first) {
  return at::arange(first, first + size, at::kByte);
}

TEST(ScriptArchivesTest, EqualOnesAreOne) {
  EXPECT_TRUE(
      at::equal(pack_archives({bytes(5, 1), bytes(5, 1)}), bytes(5, 1)));
  const auto one = unpack_archives(bytes(5, 1));
  ASSERT_EQ(one.size(), 1U);
  EXPECT_TRUE(at::equal(one[0], bytes(5, 1)));
}

TEST(ScriptArchivesTest, DifferentOnesAreKept) {
  const std::vector<at::Tensor> archives{
      bytes(5, 1), bytes(0, 0), bytes(5, 2), bytes(70, 3)};
  const auto unpacked = unpack_archives(pack_archives(archives));
  ASSERT_EQ(unpacked.size(), archives.size());
  for (size_t i = 0; i < archives.size(); ++i) {
    EXPECT_TRUE(at::equal(unpacked[i], archives[i]));
  }
}

TEST(ScriptArchivesTest, DamagedBytesAreRefused) {
  const at::Tensor packed = pack_archives({bytes(5, 1), bytes(7, 1)});
  const std::string damaged = "load: the updater is damaged";
  const int64_t prefix = static_cast<int64_t>(sizeof("torchkv updaters")) - 1;
  for (int64_t size = prefix; size < packed.numel(); ++size) {
    const at::Tensor part = packed.slice(0, 0, size);
    EXPECT_EQ(error_text([&] { unpack_archives(part); }), damaged) << size;
  }
  const at::Tensor longer = at::cat({packed, bytes(1, 0)});
  EXPECT_EQ(error_text([&] { unpack_archives(longer); }), damaged);
  for (int64_t i = prefix; i < prefix + 24; ++i) { // the number and the sizes
    const at::Tensor changed = packed.clone();
    changed[i] = 255;
    EXPECT_EQ(error_text([&] { unpack_archives(changed); }), damaged) << i;
  }
}

} // namespace
} // namespace torchkv
