#include <gtest/gtest.h>

#include "dist/transport/frame.h"
#include "random_frame.h"

namespace torchkv::dist {
namespace {

Message pull_of(SliceListPtr list) {
  Message message;
  message.kind = Kind::kPull;
  message.slice = list->name();
  message.count = static_cast<int32_t>(list->size());
  message.list = std::move(list);
  message.opno = 1;
  return message;
}

TEST(ListCacheTest, AListIsMadeOnce) {
  ListCache cache;
  Limits limits = kRandomLimits;
  limits.lists = &cache;
  const auto decoded = [&](const Message& message) {
    const Encoded encoded =
        encode({message}, Direction::kRequest, random_token());
    const auto frame = decode(
        to_blob(encoded.head),
        encoded.payloads,
        Direction::kRequest,
        random_token(),
        limits);
    EXPECT_TRUE(frame);
    return frame->at(0).list;
  };
  RandomFrames random(3);
  std::vector<Message> messages;
  std::vector<SliceListPtr> lists;
  for (int i = 0; i < 100; ++i) {
    messages.push_back(pull_of(random.list()));
    lists.push_back(decoded(messages.back()));
    EXPECT_EQ(*lists.back(), *messages.back().list);
    EXPECT_EQ(decoded(messages.back()), lists.back());
  }
  EXPECT_EQ(decoded(messages[0]), lists[0]);
  // As many others as it keeps: the oldest is made again.
  for (int i = 0; i < 100; ++i) {
    decoded(pull_of(
        std::make_shared<const SliceList>(std::vector{
            SliceList::Part{std::string(60'000, 'x'), i},
            SliceList::Part{"b", 1}})));
  }
  EXPECT_NE(decoded(messages[0]), lists[0]);
  EXPECT_TRUE(are_same(decoded(messages[0]), lists[0]));
}

} // namespace
} // namespace torchkv::dist
