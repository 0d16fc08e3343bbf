// Server: pulls that ask for a part of the value.
#include <gtest/gtest.h>

#include <cstring>
#include <memory>
#include <utility>
#include <vector>

#include "dist/protocol/server.h"
#include "server_script.h"

namespace torchkv::dist {
namespace {

using Values = ServerScript::Values;

// What the driver does: a query has the indices of numbers.
ValuePtr select(
    const SliceId& slice,
    const KeySpec& spec,
    const Value& value,
    const Blobs& query) {
  EXPECT_EQ(slice, ServerScript::slice());
  EXPECT_EQ(spec, ServerScript::spec());
  const Values all = ServerScript::join(value.pieces);
  Values found;
  for (const int64_t i : ServerScript::join(query)) {
    if (i >= static_cast<int64_t>(all.size())) {
      return nullptr;
    }
    found.push_back(all[static_cast<size_t>(i)]);
  }
  auto answer = std::make_shared<Value>();
  answer->pieces = ServerScript::cut(found);
  return answer;
}

Message query(ServerScript& s, int32_t rank, const Values& indices) {
  const Message message = s.operation(rank, Kind::kPull, ServerScript::slice());
  s.send_parts(message, indices);
  return message;
}

Config with_values(Config config) {
  config.heartbeat = config.lost = 1000;
  return config;
}

TEST(ServerQueryTest, AnswersHaveThePart) {
  for (const bool leases : {false, true}) {
    Config config = with_values(ServerScript::config(1));
    config.leases = leases;
    ServerScript s(config);
    s.server.set_select(select);
    s.push(0, 1);
    if (!leases) {
      s.apply_all();
    }
    const Message first = query(s, 0, {3, 0, 1}); // in two pieces
    if (leases) { // its own push is not applied yet
      EXPECT_TRUE(s.messages(0, Kind::kValue).empty());
      s.apply_all();
    }
    const auto answers = s.messages(0, Kind::kValue);
    ASSERT_EQ(answers.size(), 2);
    EXPECT_EQ(answers[0].pieces, 2);
    EXPECT_FALSE(answers[0].region);
    EXPECT_EQ(answers[0].version, 1);
    EXPECT_EQ(s.value(0, first.opno), (Values{1, 1, 1}));
    EXPECT_TRUE(s.view()->leases.empty());
    // A retry brings the same answer, without a look at the value.
    s.server.set_select(nullptr);
    s.wait(config.retry);
    s.send(first);
    EXPECT_EQ(s.messages(0, Kind::kError).size(), 0);
    EXPECT_EQ(s.messages(0, Kind::kValue).size(), 4);
    EXPECT_EQ(s.value(0, first.opno), (Values{1, 1, 1}));
  }
}

TEST(ServerQueryTest, AnOperationBeginsWithAllPieces) {
  ServerScript s(with_values(ServerScript::config(1)));
  s.server.set_select(select);
  const Message message = s.operation(1, Kind::kPull, ServerScript::slice());
  const auto parts = ServerScript::parts(message, {0, 1, 2});
  s.send(parts[1]);
  EXPECT_TRUE(s.messages(1, Kind::kValue).empty());
  s.send(parts[0]);
  EXPECT_EQ(s.value(1, message.opno), (Values{0, 0, 0}));
}

// The rank gets an error; its stream and the others go on.
TEST(ServerQueryTest, WhatTheSliceDoesNotHaveIsAnError) {
  for (const auto quorum : {std::optional<int32_t>(), std::optional(1)}) {
    ServerScript s(with_values(ServerScript::config(quorum, 2)));
    const auto expect_error = [&](const Message& asked) {
      const Message error = s.last(1, Kind::kError);
      EXPECT_EQ(error.opno, asked.opno);
      EXPECT_EQ(error.error->code, ErrorCode::kShape);
      EXPECT_EQ(error.error->who, 1);
    };
    expect_error(query(s, 1, {0})); // nothing can answer it
    s.server.set_select(select);
    expect_error(query(s, 1, {4}));
    EXPECT_FALSE(s.server.fatal());
    const Message good = query(s, 1, {2});
    EXPECT_EQ(s.value(1, good.opno), (Values{0}));
    s.push(0, 1);
    s.push(1, 1);
    EXPECT_FALSE(s.begun().empty());
  }
}

TEST(ServerQueryTest, RegionsAndBadPiecesAreDropped) {
  Config config = with_values(ServerScript::config(1));
  config.push_regions = true;
  ServerScript s(config);
  s.server.set_select(select);
  Message message = s.operation(1, Kind::kPull, ServerScript::slice());
  message.pieces = 1;
  message.index = 0;
  message.payload = ServerScript::blob({1});
  const auto send_with = [&](const ServerScript::Edit& edit) {
    Message bad = message;
    edit(bad);
    s.send(bad);
  };
  send_with([](auto& bad) {
    bad.region = Region{1, 0, 8};
    bad.payload = Blob();
  });
  send_with([](auto& bad) { bad.index = 1; });
  send_with([](auto& bad) { bad.pieces = 2; }); // the first one is too short
  send_with([](auto& bad) { bad.payload = ServerScript::blob({1, 2, 3}); });
  EXPECT_TRUE(s.messages(1, Kind::kGot).empty());
  EXPECT_TRUE(s.messages(1, Kind::kError).empty());
  s.send(message);
  EXPECT_EQ(s.value(1, message.opno), (Values{0}));
}

} // namespace
} // namespace torchkv::dist
