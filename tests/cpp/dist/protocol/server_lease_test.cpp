// Server: pulls that are answered by a region of shared memory.
#include <gtest/gtest.h>

#include <vector>

#include "dist/protocol/server.h"
#include "server_script.h"

namespace torchkv::dist {
namespace {

using Values = ServerScript::Values;
using Opnos = std::vector<int64_t>;

TEST(ServerLeaseTest, ALeasedSlotIsNotWritten) {
  ServerScript s(ServerScript::with_leases(ServerScript::config(1)));
  const auto slots = s.all<MakeSlots>()[0]->slots;
  const int64_t first = s.pull(1);
  EXPECT_EQ(s.last(1, Kind::kValue).region, slots[0]->region);
  EXPECT_EQ(s.last(1, Kind::kValue).index, -1);
  s.push(0, 1);
  ASSERT_EQ(s.begun().size(), 1);
  EXPECT_EQ(s.begun()[0]->source, slots[0]);
  EXPECT_EQ(s.begun()[0]->target, slots[1]);
  EXPECT_EQ(slots[1]->version, 1); // stamped before it is written
  s.apply(s.begun()[0]);
  s.pull(2);
  EXPECT_EQ(s.last(2, Kind::kValue).region, slots[1]->region);
  s.push(0, 2);
  EXPECT_EQ(s.begun().size(), 1); // both are leased
  EXPECT_EQ(s.view()->leases.size(), 2);
  s.lose(1); // ends its lease
  ASSERT_EQ(s.begun().size(), 2);
  EXPECT_EQ(s.begun()[1]->target, slots[0]);
  s.apply(s.begun()[1]);
  EXPECT_EQ(ServerScript::join(slots[1]->pieces), (Values{1, 1, 1, 1}));
  s.push(0, 3);
  s.apply(s.begun()[2]);
  EXPECT_EQ(s.begun()[2]->target, slots[0]); // in place
  Message free = s.request(2, Kind::kFree);
  free.opnos = {2, 77};
  s.send(free);
  EXPECT_EQ(s.last(2, Kind::kFreed).opnos, (Opnos{2, 77}));
  EXPECT_TRUE(s.view()->leases.empty());
  EXPECT_EQ(s.stored(), (Values{3, 3, 3, 3}));
  EXPECT_EQ(first, 2);
}

TEST(ServerLeaseTest, FloorAndAckedEndLeases) {
  ServerScript s(ServerScript::with_leases(ServerScript::config(1)));
  const int64_t first = s.pull(1);
  const int64_t second = s.pull(1);
  EXPECT_EQ(s.view()->leases.size(), 2);
  s.control(1, Kind::kPull, [&](Message& message) {
    message.slice = ServerScript::slice();
    message.acked = second;
  });
  EXPECT_EQ(s.view()->leases.size(), 2);
  Message beat = s.request(1, Kind::kHeartbeat);
  beat.header.floor = second + 2;
  s.send(beat);
  EXPECT_TRUE(s.view()->leases.empty());
  EXPECT_LT(first, second);
}

TEST(ServerLeaseTest, NoLeaseAfterTheSession) {
  ServerScript s(ServerScript::with_leases(ServerScript::config(1)));
  s.push(1, 1);
  s.push(1, 2);
  s.pull(1, 2);
  s.pull(1, 1);
  s.apply(s.begun()[0]);
  s.lose(1);
  s.apply(s.begun().back());
  EXPECT_TRUE(s.view()->leases.empty());
}

} // namespace
} // namespace torchkv::dist
