// Copies of lines: every length and alignment, streamed and not.
#include "kernels/cpu/lines.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <random>
#include <vector>

#include "kernels/cpu/cache_line.h"
#include "plain_lines.h"

namespace torchkv {
namespace {

using testing::Memory;

TEST(CopyLineTest, EveryLengthAndAlignment) {
  std::mt19937_64 random(0);
  constexpr int64_t kBytes = 9001;
  Memory source(kBytes, 5);
  testing::fill(random, at::kByte, source.data(), kBytes, /*all_bits=*/true);
  for (const int64_t num_bytes :
       {0, 1, 63, 64, 65, 127, 128, 2047, 2048, 2049, 4096, 9001}) {
    for (size_t num_outs = 1; num_outs <= 4; ++num_outs) {
      for (const bool stream : {false, true}) {
        std::vector<Memory> memory;
        std::vector<char*> outs;
        memory.reserve(num_outs);
        for (size_t k = 0; k < num_outs; ++k) {
          memory.emplace_back(num_bytes, static_cast<int64_t>(k * 13 % 64));
          outs.push_back(memory[k].data());
        }
        kernels::cpu::copy_line(source.data(), outs, num_bytes, stream);
        kernels::cpu::end_stream();
        for (auto& out : memory) {
          EXPECT_TRUE(
              std::equal(out.data(), out.data() + num_bytes, source.data()))
              << num_bytes << " bytes into " << num_outs;
          EXPECT_TRUE(out.guards_are_intact());
        }
      }
    }
  }
}

TEST(CopyLineTest, OntoItself) {
  std::mt19937_64 random(0);
  constexpr int64_t kBytes = 5001;
  for (const bool stream : {false, true}) {
    Memory source(kBytes, 0);
    testing::fill(random, at::kByte, source.data(), kBytes, /*all_bits=*/true);
    Memory out(kBytes, 0);
    const std::vector<char> before(source.data(), source.data() + kBytes);
    kernels::cpu::copy_line(
        source.data(), {source.data(), out.data()}, kBytes, stream);
    kernels::cpu::end_stream();
    EXPECT_TRUE(std::equal(before.begin(), before.end(), source.data()));
    EXPECT_TRUE(std::equal(before.begin(), before.end(), out.data()));
  }
}

} // namespace
} // namespace torchkv
