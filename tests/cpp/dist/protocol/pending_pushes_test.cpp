// The pushes of a slice that wait for their round, against a map of queues.
#include <gtest/gtest.h>

#include <deque>
#include <map>
#include <memory>
#include <random>
#include <vector>

#include "dist/protocol/server_state.h"

namespace torchkv::dist {
namespace {

ServerOperationPtr push_of(int32_t rank, int64_t opno) {
  Message message;
  message.kind = Kind::kPush;
  message.header.rank = rank;
  message.opno = opno;
  return std::make_shared<ServerOperation>(message);
}

TEST(PendingPushesTest, RandomOperations) {
  std::mt19937 random(1);
  PendingPushes pending;
  std::map<int32_t, std::deque<int64_t>> expected;
  for (int64_t opno = 1; opno < 2000; ++opno) {
    const auto rank = static_cast<int32_t>(random() % 5);
    switch (random() % 5) {
      case 0:
        pending.erase(rank);
        expected.erase(rank);
        break;
      case 1:
      case 2:
        if (pending.has(rank)) {
          EXPECT_EQ(pending.pop(rank)->opno, expected.at(rank).front());
          expected.at(rank).pop_front();
          if (expected.at(rank).empty()) {
            expected.erase(rank);
          }
        }
        break;
      default:
        pending.add(push_of(rank, opno));
        expected[rank].push_back(opno);
    }
    ASSERT_EQ(pending.empty(), expected.empty());
    ASSERT_EQ(pending.num_ranks(), expected.size());
    std::vector<int64_t> first; // of each rank
    for (const auto* push = pending.first_from(0); push != nullptr;
         push = pending.first_from(push->rank + 1)) {
      ASSERT_TRUE(pending.has(push->rank));
      first.push_back(push->opno);
    }
    std::vector<int64_t> first_expected;
    for (const auto& [of_rank, opnos] : expected) {
      first_expected.push_back(opnos.front());
    }
    ASSERT_EQ(first, first_expected);
  }
}

} // namespace
} // namespace torchkv::dist
