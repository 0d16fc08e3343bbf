// Server: several slices as one.
#include <gtest/gtest.h>

#include "dist/protocol/server.h"
#include "server_script.h"

namespace torchkv::dist {
namespace {

constexpr int32_t kRanks = 2;

// A value of a list whose slices have one number each.
struct NumbersOfList final : Value {
  explicit NumbersOfList(const ServerScript::Values& values) {
    pieces = {ServerScript::blob(values)};
  }
  ValuePtr part(size_t i) const override {
    auto value = std::make_shared<Value>();
    value->pieces = {pieces[0].slice(i * sizeof(int64_t), sizeof(int64_t))};
    return value;
  }
};

// A server of three keys of one number, which both ranks have pushed once, one
// after the other.
struct ServerListsTest : testing::Test {
  explicit ServerListsTest(std::optional<int32_t> quorum = kSync)
      : script(
            ServerScript::config(quorum, kRanks),
            nullptr,
            /*attached=*/false) {
    std::vector<SliceList::Part> parts;
    for (const char* key : {"a", "b", "c"}) {
      parts.push_back({key, 1});
    }
    list = std::make_shared<const SliceList>(std::move(parts));
    for (int32_t rank = 0; rank < kRanks; ++rank) {
      script.hello(rank);
      for (size_t i = 0; i < 3; ++i) {
        Message init = script.request(rank, Kind::kInit);
        init.slice = list->slice(i);
        init.opno = next(rank, 1);
        init.spec = ServerScript::spec(1);
        if (rank == 0) {
          init.pieces = 1;
          init.index = 0;
          init.payload = ServerScript::blob({100});
        }
        script.send(init);
      }
      last[rank] = 1;
    }
    push(0, 1);
    push(1, 1);
    apply();
  }

  int64_t next(int32_t rank, int64_t count) {
    const int64_t first = opno[rank] + 1;
    opno[rank] += count;
    return first;
  }
  // The rank's next operation on the list, whose numbers are 1, 2 and 3.
  Message make(int32_t rank, Kind kind, int64_t round) {
    Message message = script.request(rank, kind);
    message.list = list;
    message.slice = list->name();
    message.count = 3;
    message.opno = next(rank, 3);
    message.prev = std::exchange(last[rank], message.opno);
    message.acked = message.opno;
    message.round = round;
    if (kind != Kind::kPull) {
      message.total = 3;
      message.item_bytes = sizeof(int64_t);
      message.pieces = 1;
      message.index = 0;
      message.payload = ServerScript::blob({1, 2, 3});
    }
    return message;
  }
  int64_t push(int32_t rank, int64_t round, Kind kind = Kind::kPush) {
    const Message message = make(rank, kind, round);
    script.send(message);
    return message.opno;
  }
  // Its push of one slice by itself.
  Message part(const Message& of, size_t i) const {
    Message message = of;
    const auto number = static_cast<int64_t>(i);
    message.list = nullptr;
    message.count = 1;
    message.slice = list->slice(i);
    message.opno += number;
    message.prev += number;
    message.acked = message.opno;
    message.total = 1;
    message.payload = of.payload.slice(i * sizeof(int64_t), sizeof(int64_t));
    return message;
  }
  // The rounds that have begun since.
  std::vector<RoundPtr> begun() {
    const auto all = script.begun();
    const std::vector<RoundPtr> result(
        all.begin() + static_cast<int64_t>(num_begun), all.end());
    num_begun = all.size();
    return result;
  }
  void apply() {
    for (auto rounds = begun(); !rounds.empty(); rounds = begun()) {
      for (const auto& round : rounds) {
        apply(round);
      }
    }
  }
  void apply(const RoundPtr& round) {
    if (!round->parts) {
      script.apply(round);
      return;
    }
    round->result = std::make_shared<NumbersOfList>(sum(*round));
    script.server.on_applied(round, std::nullopt, script.now);
    script.collect();
  }
  static ServerScript::Values sum(const Round& round) {
    ServerScript::Values values;
    for (size_t i = 0; i < 3; ++i) {
      values.push_back(ServerScript::join(round.source->part(i)->pieces).at(0));
      for (const auto& pushed : round.pushes) {
        values.back() += ServerScript::join(pushed.pieces).at(i);
      }
    }
    return values;
  }
  std::vector<int64_t> stored() {
    std::vector<int64_t> result;
    for (const auto& view : script.server.slices()) {
      result.push_back(ServerScript::join(view.value->pieces).at(0));
    }
    return result;
  }

  SliceListPtr list;
  ServerScript script;
  std::map<int32_t, int64_t> opno;
  std::map<int32_t, int64_t> last; // of the first slice
  size_t num_begun = 0;
};

struct AsyncServerListsTest : ServerListsTest {
  AsyncServerListsTest() : ServerListsTest(1) {}
};

TEST_F(ServerListsTest, SlicesInStepAreOneRound) {
  const int64_t first = push(0, 2);
  const int64_t second = push(1, 2, Kind::kPushPull);
  const auto rounds = begun();
  ASSERT_EQ(rounds.size(), 1);
  ASSERT_TRUE(rounds[0]->parts);
  EXPECT_EQ(rounds[0]->parts->size(), 3);
  EXPECT_EQ(rounds[0]->num_elements, 3);
  apply(rounds[0]);
  EXPECT_EQ(script.last(0, Kind::kDone).opno, first);
  EXPECT_EQ(script.last(0, Kind::kDone).count, 3);
  EXPECT_EQ(script.last(1, Kind::kValue).count, 3);
  EXPECT_EQ(script.value(1, second), (ServerScript::Values{104, 108, 112}));
  EXPECT_EQ(stored(), (std::vector<int64_t>{104, 108, 112}));
}

TEST_F(ServerListsTest, APushOfOneSliceTakesItApart) {
  push(0, 2);
  const Message other = make(1, Kind::kPushPull, 2);
  script.send(part(other, 1));
  auto rounds = begun();
  ASSERT_EQ(rounds.size(), 1);
  EXPECT_FALSE(rounds[0]->parts);
  EXPECT_EQ(rounds[0]->slice, (SliceId{"b", 0}));
  apply(rounds[0]);
  EXPECT_EQ(script.value(1, other.opno + 1), ServerScript::Values{108});
  script.send(part(other, 2));
  script.send(part(other, 0));
  apply();
  EXPECT_EQ(stored(), (std::vector<int64_t>{104, 108, 112}));
  // Both ranks' next pushes of the list make one again.
  push(0, 3);
  push(1, 3);
  rounds = begun();
  ASSERT_EQ(rounds.size(), 1);
  EXPECT_TRUE(rounds[0]->parts);
}

TEST_F(ServerListsTest, ItComesApartWhileItIsUpdated) {
  push(0, 2);
  const int64_t pulled = push(1, 2, Kind::kPushPull);
  const auto rounds = begun();
  ASSERT_EQ(rounds.size(), 1);
  const Message next = make(0, Kind::kPush, 3);
  script.send(part(next, 0));
  for (const auto& view : script.server.slices()) {
    EXPECT_TRUE(view.busy);
    EXPECT_TRUE(view.value); // the one before
  }
  EXPECT_EQ(stored(), (std::vector<int64_t>{102, 104, 106}));
  EXPECT_TRUE(script.messages(1, Kind::kValue).empty());
  apply(rounds[0]);
  for (int64_t i = 0; i < 3; ++i) {
    EXPECT_EQ(
        script.value(1, pulled + i), ServerScript::Values{100 + 4 * (i + 1)});
  }
}

// Until its first update, a list's value is in as many places as it has slices.
TEST_F(ServerListsTest, APullBeforeTheFirstUpdateIsOfEachSlice) {
  const Message apart = make(0, Kind::kPush, 2);
  for (size_t i = 0; i < 3; ++i) {
    script.send(part(apart, i));
  }
  push(1, 2);
  apply();
  push(0, 3); // of slices that have come together again
  const Message pull = make(1, Kind::kPull, 2);
  script.send(pull);
  for (int64_t i = 0; i < 3; ++i) {
    EXPECT_EQ(
        script.value(1, pull.opno + i), ServerScript::Values{104 + 4 * i});
  }
  push(1, 3);
  apply();
  EXPECT_EQ(stored(), (std::vector<int64_t>{106, 112, 118}));
}

TEST_F(ServerListsTest, AnErrorIsOfOneSlice) {
  const int64_t first = push(0, 2);
  push(1, 2);
  const auto rounds = begun();
  ASSERT_EQ(rounds.size(), 1);
  rounds[0]->errors = {std::nullopt, "thrown", std::nullopt};
  apply(rounds[0]);
  EXPECT_EQ(script.answers(0, Kind::kError), (std::vector<int64_t>{first + 1}));
  EXPECT_EQ(script.last(0, Kind::kError).error->slice, (SliceId{"b", 0}));
  EXPECT_TRUE(script.has(0, Kind::kDone, first));
  EXPECT_TRUE(script.has(0, Kind::kDone, first + 2));
}

TEST_F(ServerListsTest, SlicesOfOtherOperationsAreOneAgain) {
  Message pull = make(0, Kind::kPull, 1);
  opno[0] -= 2; // it is on one slice
  last[0] -= 3;
  pull.list = nullptr;
  pull.slice = list->slice(1);
  pull.count = 1;
  pull.prev += 1;
  script.send(pull);
  EXPECT_EQ(script.value(0, pull.opno), ServerScript::Values{104});
  push(1, 2);
  Message sent = make(0, Kind::kPushPull, 2);
  sent.prevs = {sent.prev, pull.opno, sent.prev + 2};
  Message wrong = sent;
  wrong.prevs[2] -= 1;
  wrong.opno += 10; // is never the next one
  script.send(wrong);
  EXPECT_TRUE(begun().empty());
  script.send(sent);
  apply();
  EXPECT_EQ(stored(), (std::vector<int64_t>{104, 108, 112}));
}

TEST_F(ServerListsTest, ARepeatedMessageIsAnsweredAgain) {
  const Message first = make(0, Kind::kPushPull, 2);
  script.send(first);
  push(1, 2);
  apply();
  Message again = first;
  again.index = -1;
  again.payload = Blob();
  again.have.clear();
  script.out.clear();
  script.wait(2); // until the first answer counts as lost
  script.send(again);
  EXPECT_EQ(script.value(0, first.opno), (ServerScript::Values{104, 108, 112}));
}

TEST_F(ServerListsTest, ASnapshotHasEachSlice) {
  push(0, 2);
  push(1, 2);
  apply();
  script.control(0, Kind::kSnapshot, [&](Message& message) {
    message.opno = next(0, 1);
    message.prev = 0;
    message.snap = 1;
    message.counts = {
        {list->slice(0), 2}, {list->slice(1), 2}, {list->slice(2), 2}};
  });
  const auto written = script.all<WriteShard>();
  ASSERT_EQ(written.size(), 1);
  ASSERT_EQ(written[0]->shard.slices.size(), 3);
  for (size_t i = 0; i < 3; ++i) {
    const auto& [slice, shot] = written[0]->shard.slices[i];
    EXPECT_EQ(slice, list->slice(i));
    EXPECT_EQ(
        ServerScript::join(shot->value->pieces),
        ServerScript::Values{104 + 4 * static_cast<int64_t>(i)});
  }
}

// As rank 0's push says, before the snapshot itself is known.
TEST_F(ServerListsTest, APushAfterASnapshotTakesItApart) {
  push(1, 2);
  Message after = make(0, Kind::kPush, 2);
  after.snap = 1;
  script.send(after);
  apply();
  EXPECT_EQ(stored(), (std::vector<int64_t>{104, 108, 112}));
  script.control(0, Kind::kSnapshot, [&](Message& message) {
    message.opno = next(0, 1);
    message.prev = 0;
    message.snap = 1;
    message.counts = {
        {list->slice(0), 1}, {list->slice(1), 1}, {list->slice(2), 1}};
  });
  const auto written = script.all<WriteShard>();
  ASSERT_EQ(written.size(), 1);
  for (size_t i = 0; i < 3; ++i) {
    EXPECT_EQ(
        ServerScript::join(
            written[0]->shard.slices.at(i).second->value->pieces),
        ServerScript::Values{102 + 2 * static_cast<int64_t>(i)});
  }
}

TEST_F(ServerListsTest, AnAnswerFromBeforeIsRepeatedAsItWas) {
  const Message other = make(1, Kind::kPush, 2);
  script.send(part(other, 1));
  const Message first = make(0, Kind::kPush, 2); // not joined: one waits
  script.send(first);
  script.send(part(other, 0));
  script.send(part(other, 2));
  apply();
  push(1, 3); // these are joined
  script.out.clear();
  num_begun = 0;
  script.send(first);
  EXPECT_EQ(
      script.answers(0, Kind::kDone),
      (std::vector<int64_t>{first.opno, first.opno + 1, first.opno + 2}));
  push(0, 3);
  const auto rounds = begun();
  ASSERT_EQ(rounds.size(), 1);
  EXPECT_TRUE(rounds[0]->parts);
}

TEST_F(ServerListsTest, WhatCameTooEarlyBeginsAlsoWhereItComesApart) {
  const Message first = make(0, Kind::kPush, 2);
  Message second = make(0, Kind::kPush, 3);
  second.snap = 1; // not the same for all
  Message third = make(0, Kind::kPush, 4);
  third.snap = 1;
  push(1, 2);
  script.send(third);
  script.send(second);
  EXPECT_TRUE(begun().empty());
  script.send(first);
  push(1, 3);
  push(1, 4);
  apply();
  EXPECT_EQ(stored(), (std::vector<int64_t>{108, 116, 124}));
  for (const int64_t done : {first.opno, second.opno, third.opno}) {
    EXPECT_TRUE(script.has(0, Kind::kDone, done));
  }
}

TEST_F(ServerListsTest, WhatNoWorkerSendsIsDropped) {
  const Message right = make(0, Kind::kPush, 2);
  const auto is_dropped = [&](const auto& edit) {
    Message wrong = right;
    edit(wrong);
    script.send(wrong);
    return script.messages(0, Kind::kWait).empty() && begun().empty();
  };
  EXPECT_TRUE(is_dropped([](Message& m) { m.slice.key = "b"; }));
  EXPECT_TRUE(is_dropped([](Message& m) { m.count = 2; }));
  EXPECT_TRUE(is_dropped([](Message& m) { m.total = 4; }));
  EXPECT_TRUE(is_dropped([](Message& m) { m.is_encoded = true; }));
  EXPECT_TRUE(is_dropped([](Message& m) { m.item_bytes = 0; }));
  EXPECT_TRUE(is_dropped([](Message& m) { m.item_bytes = 4; }));
  EXPECT_TRUE(is_dropped([](Message& m) { m.pieces = 2; }));
  EXPECT_TRUE(is_dropped([](Message& m) { m.prev = 0; }));
  EXPECT_TRUE(is_dropped([](Message& m) { m.kind = Kind::kDelete; }));
  EXPECT_TRUE(is_dropped([](Message& m) { m.region = Region{1, 0, 24}; }));
  script.send(right);
  push(1, 2);
  EXPECT_EQ(begun().size(), 1);
}

TEST_F(ServerListsTest, ARoundOutOfOrderIsThatOfASlice) {
  push(0, 3);
  ASSERT_TRUE(script.server.fatal());
  EXPECT_EQ(script.server.fatal()->code, ErrorCode::kRound);
  EXPECT_EQ(script.server.fatal()->slice, list->slice(0));
}

TEST_F(AsyncServerListsTest, ItComesApartWhereARankIsLost) {
  push(0, 2);
  const Message pull = make(1, Kind::kPull, 1);
  apply();
  script.send(pull);
  EXPECT_EQ(script.value(1, pull.opno).size(), 3);
  script.lose(1);
  EXPECT_EQ(stored(), (std::vector<int64_t>{103, 106, 109}));
  push(0, 3);
  apply();
  EXPECT_EQ(stored(), (std::vector<int64_t>{104, 108, 112}));
}

} // namespace
} // namespace torchkv::dist
