// Worker: operations on lists of slices.
#include <gtest/gtest.h>

#include "dist/protocol/worker.h"
#include "worker_scene.h"

namespace torchkv::dist {
namespace {

using RK = Request::Kind;

const std::vector<Key> kKeys{"a", "b", "c"};

// A call on all keys, of two floats each, that names them together.
Request on_list(RK kind, const std::vector<Key>& keys = kKeys) {
  Request result(kind);
  Request::Item& item = result.items.emplace_back();
  std::vector<SliceList::Part> parts;
  for (const auto& key : keys) {
    parts.push_back({key, 2});
  }
  item.key = keys[0];
  item.list = std::make_shared<const SliceList>(std::move(parts));
  item.item_bytes = 4;
  if (kind != RK::kPull) {
    item.value = bytes(8 * keys.size());
  }
  return result;
}

struct WorkerListsTest : testing::Test {
  WorkerListsTest() : scene(test_config(1, std::nullopt)) {
    scene.start();
    scene.init(kKeys);
    Message pushed = send(RK::kPush);
    EXPECT_EQ(pushed.prev, 1); // that of the first slice
    last = pushed.opno;
    scene.got(last, {0});
    scene.give(answer(pushed, Kind::kDone));
    scene.clear();
  }
  // The list's message.
  Message send(RK kind) {
    scene.clear();
    call = scene.call(on_list(kind));
    const auto sent = scene.take_sent();
    EXPECT_EQ(sent.size(), 1);
    return sent.at(0);
  }
  Message answer(const Message& to, Kind kind) const {
    Message message = scene.from(0, kind, to.opno);
    message.count = to.count;
    return message;
  }

  WorkerScene scene;
  int64_t last = 0;
  CallId call = 0;
};

TEST_F(WorkerListsTest, SlicesInStepAreOneOperation) {
  const Message first = send(RK::kPushPull);
  ASSERT_TRUE(first.list);
  EXPECT_EQ(first.slice, (SliceId{"a", SliceId::kList}));
  EXPECT_EQ(first.count, 3);
  EXPECT_EQ(first.opno, last + 3);
  EXPECT_EQ(first.prev, last);
  EXPECT_TRUE(first.prevs.empty());
  EXPECT_EQ(first.round, 2);
  EXPECT_EQ(first.total, 6);
  EXPECT_EQ(first.pieces, 1);
  EXPECT_EQ(first.payload.size(), 24);
  Message value = answer(first, Kind::kValue);
  value.pieces = 1;
  value.index = 0;
  value.version = 2;
  value.payload = bytes(24, 50);
  scene.give(value);
  const Return end = scene.ended(call);
  ASSERT_FALSE(end.error);
  ASSERT_EQ(end.results.size(), 1);
  EXPECT_TRUE(end.results[0].slice.is_list());
  EXPECT_EQ(end.results[0].pieces[0].size(), 24);
  const Message second = send(RK::kPush);
  EXPECT_EQ(second.opno, last + 6);
  EXPECT_EQ(second.prev, first.opno);
  EXPECT_EQ(second.base, 2);
  EXPECT_EQ(second.round, 3);
  EXPECT_EQ(scene.worker.version({"b", 0}), 2);
}

TEST_F(WorkerListsTest, AValueOfAnotherSizeIsNotTheLists) {
  const Message sent = send(RK::kPull);
  EXPECT_EQ(sent.pieces, 0);
  Message value = answer(sent, Kind::kValue);
  value.pieces = 1;
  value.index = 0;
  value.payload = bytes(23);
  scene.give(value);
  EXPECT_FALSE(scene.has_ended(call));
  value.payload = bytes(24);
  scene.give(value);
  EXPECT_TRUE(scene.has_ended(call));
}

TEST_F(WorkerListsTest, AnAnswerForASliceTakesTheListApart) {
  const Message sent = send(RK::kPushPull);
  scene.give(scene.value(0, sent.opno + 1, bytes(8, 20)));
  // The others are asked for one by one, with what the list has of them. The
  // first one's piece has the number of the list's, which is under way.
  const auto again = scene.take_sent();
  std::vector<int64_t> opnos;
  for (const auto& message : again) {
    if (is_operation(message.kind)) {
      EXPECT_FALSE(message.list);
      EXPECT_EQ(message.round, 2);
      EXPECT_EQ(message.total, 2);
      EXPECT_EQ(message.prev, message.opno - 3);
      opnos.push_back(message.opno);
    }
  }
  EXPECT_EQ(opnos, std::vector<int64_t>{sent.opno + 2});
  EXPECT_EQ(again.back().payload.data()[0], std::byte{16});
  scene.give(scene.value(0, sent.opno + 2, bytes(8, 30)));
  scene.give(scene.value(0, sent.opno, bytes(8, 10)));
  const Return end = scene.ended(call);
  ASSERT_EQ(end.results.size(), 3);
  for (size_t i = 0; i < 3; ++i) {
    EXPECT_EQ(end.results[i].slice, (SliceId{kKeys[i], 0}));
    EXPECT_EQ(
        end.results[i].pieces[0].data()[0],
        static_cast<std::byte>(10 * (i + 1)));
  }
}

TEST_F(WorkerListsTest, ACallOnOneKeyTakesTheListApart) {
  const Message sent = send(RK::kPush);
  scene.call(request(RK::kPush, {"b"}));
  const Message again = scene.take_sent().back();
  EXPECT_EQ(again.slice, (SliceId{"b", 0}));
  EXPECT_EQ(again.prev, sent.opno + 1);
  EXPECT_EQ(again.round, 3);
  // The list is not one again while something is under way, or where its
  // slices have been pushed differently often.
  for (const int64_t opno : {sent.opno, sent.opno + 1, sent.opno + 2}) {
    scene.done(opno);
  }
  EXPECT_TRUE(scene.has_ended(call));
  scene.done(again.opno);
  scene.call(on_list(RK::kPush));
  for (const auto& message : scene.take_sent()) {
    EXPECT_FALSE(message.list);
  }
}

TEST_F(WorkerListsTest, SlicesOfOtherOperationsAreOneAgain) {
  scene.call(request(RK::kPull, {"b"}));
  const auto pull = scene.take_sent();
  ASSERT_EQ(pull.size(), 1);
  EXPECT_EQ(pull[0].prev, last + 1);
  scene.give(scene.value(0, pull[0].opno, bytes(8)));
  const Message sent = send(RK::kPushPull);
  ASSERT_TRUE(sent.list);
  EXPECT_EQ(sent.prev, last);
  EXPECT_EQ(sent.prevs, (std::vector<int64_t>{last, pull[0].opno, last + 2}));
  // Also where it comes apart.
  scene.give(scene.value(0, sent.opno, bytes(8)));
  std::vector<int64_t> prevs;
  for (const auto& message : scene.take_sent()) {
    if (is_operation(message.kind)) {
      EXPECT_TRUE(message.prevs.empty());
      prevs.push_back(message.prev);
    }
  }
  EXPECT_EQ(prevs, (std::vector<int64_t>{pull[0].opno, last + 2}));
}

TEST_F(WorkerListsTest, OtherCallsNameEachKey) {
  Request push = on_list(RK::kPush);
  push.two_phase = true;
  scene.call(push);
  for (const auto& message : scene.take_sent()) {
    EXPECT_FALSE(message.list);
  }
  Request unknown = on_list(RK::kPull, {"a", "x"});
  const auto error = error_in(scene.ended(scene.call(unknown)));
  EXPECT_EQ(error.code, ErrorCode::kUnknown);
  EXPECT_EQ(error.slice, (SliceId{"x", 0}));
}

TEST_F(WorkerListsTest, ATimeOutNamesASlice) {
  call = scene.call(on_list(RK::kPush), 5);
  scene.run(6);
  const auto error = error_in(scene.ended(call));
  EXPECT_EQ(error.code, ErrorCode::kTimeout);
  EXPECT_EQ(error.slice, (SliceId{"a", 0}));
  EXPECT_EQ(error.round, 2);
}

TEST_F(WorkerListsTest, WhatWaitsForTheListsSlices) {
  const Message sent = send(RK::kPush);
  Message wait = answer(sent, Kind::kWait);
  wait.missing = {2};
  scene.give(wait);
  const auto got = scene.take_sent();
  EXPECT_TRUE(got.empty());
  scene.run(100);
  const auto error = error_in(scene.ended(call));
  EXPECT_EQ(error.missing, (std::vector<int32_t>{2}));
}

} // namespace
} // namespace torchkv::dist
