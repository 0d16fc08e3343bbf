// The streams of random numbers of keys.
#include "core/random_stream.h"

#include <gtest/gtest.h>

#include <set>
#include <string>

#include "core/mixed_bits.h"

namespace torchkv {
namespace {

TEST(RandomStreamTest, AreTheSameOnEveryMachine) {
  EXPECT_EQ(random_stream(7, 3, {1, 2}), random_stream(7, 3, {1, 2}));
  EXPECT_EQ(random_stream(0, 0, {}), mixed_bits(mixed_bits(0)));
}

TEST(RandomStreamTest, DifferByAllArguments) {
  std::set<uint64_t> streams;
  int count = 0;
  for (const uint64_t seed : {0, 1}) {
    for (const Key& key : {Key(0), Key(1), Key("0"), Key("w")}) {
      for (const uint64_t first : {0, 1, 2}) {
        streams.insert(random_stream(seed, key, {first}));
        for (const uint64_t second : {0, 1, 2}) {
          streams.insert(random_stream(seed, key, {first, second}));
          ++count;
        }
        ++count;
      }
    }
  }
  EXPECT_EQ(streams.size(), count);
}

} // namespace
} // namespace torchkv
