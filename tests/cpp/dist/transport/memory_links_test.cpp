#include "dist/transport/memory_links.h"

#include <gtest/gtest.h>
#include <sys/eventfd.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstring>
#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "dist/transport/host.h"
#include "dist/transport/socket_folder.h"

namespace torchkv::dist {
namespace {

constexpr size_t kSize = size_t{3} * 4096;

// One of several "processes" in this one.
class Party {
 public:
  explicit Party(int32_t rank, char token = 't')
      : memory(SharedMemory::create()),
        bell(eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC)),
        links(rank, token_of(token), memory, path(), bell),
        rank_(rank) {}
  Party(const Party&) = delete;
  Party& operator=(const Party&) = delete;
  ~Party() {
    close(bell);
    folder_.remove();
  }

  std::string path() const {
    return SocketFolder::descriptor_path(folder_.endpoint());
  }
  void connect(const Party& other) {
    links.connect(other.rank_, own_process(), other.path());
  }
  // A payload in shared memory, filled with a letter.
  Blob payload(char letter, size_t size = kSize) const {
    auto block = memory->allocate(size);
    std::memset(block.get(), letter, size);
    const void* const data = block.get();
    return {std::move(block), data, size};
  }

 private:
  static Token token_of(char letter) {
    Token token;
    token.fill(static_cast<std::byte>(letter));
    return token;
  }
  SocketFolder folder_;

 public:
  const std::shared_ptr<SharedMemory> memory;
  const int bell;
  MemoryLinks links;

 private:
  const int32_t rank_;
};

Blob blob_of(const std::vector<std::byte>& part) {
  auto owner = std::make_shared<const std::vector<std::byte>>(part);
  const auto* const data = owner->data();
  const size_t size = owner->size();
  return {std::move(owner), data, size};
}

Blob on_heap(char letter, size_t size = kSize) {
  auto owner = std::make_shared<const std::string>(size, letter);
  const auto* const data = owner->data();
  return {std::move(owner), data, size};
}

char letter_of(const Blob& blob) {
  return static_cast<char>(blob.data()[blob.size() - 1]);
}

class MemoryLinksTest : public ::testing::Test {
 protected:
  MemoryLinksTest() {
    sender.connect(receiver);
    receiver.connect(sender);
    sender.links.take_descriptors();
    receiver.links.take_descriptors();
  }
  Party sender{0};
  Party receiver{1};
};

TEST_F(MemoryLinksTest, NamedPayloadsComeToTheirPlaces) {
  std::vector<Blob> payloads{
      on_heap('a'),
      sender.payload('b'),
      sender.payload('c'),
      on_heap('d'),
      sender.payload('e', 100), // too small
      sender.payload('f')};
  const Blob part = sender.links.name(1, payloads);
  EXPECT_TRUE(MemoryLinks::is_names(part));
  ASSERT_EQ(payloads.size(), 3);
  ASSERT_TRUE(receiver.links.resolve(part, payloads));
  std::string letters;
  for (const auto& payload : payloads) {
    letters += letter_of(payload);
  }
  EXPECT_EQ(letters, "abcdef");
  EXPECT_FALSE(sender.memory->find(payloads[1].data(), kSize).has_value());
}

TEST_F(MemoryLinksTest, ASenderKeepsWhatIsRead) {
  std::vector<Blob> payloads{sender.payload('a'), sender.payload('b')};
  const size_t used = sender.memory->num_used();
  const Blob part = sender.links.name(1, payloads);
  ASSERT_TRUE(receiver.links.resolve(part, payloads));
  sender.links.reclaim();
  EXPECT_EQ(sender.links.num_held(), 2);
  EXPECT_EQ(sender.memory->num_used(), used);
  Blob copy = payloads[0].slice(1, 5); // as good as the payload
  payloads.clear();
  sender.links.reclaim();
  EXPECT_EQ(sender.links.num_held(), 1);
  EXPECT_EQ(sender.memory->num_used(), used / 2);
  EXPECT_EQ(letter_of(copy), 'a');
  std::thread([&] { copy = Blob(); }).join();
  sender.links.reclaim();
  EXPECT_EQ(sender.links.num_held(), 0);
  EXPECT_EQ(sender.memory->num_used(), 0);
}

TEST_F(MemoryLinksTest, TicketsAreUsedAgain) {
  for (int i = 0; i < 1000; ++i) {
    const char letter = static_cast<char>('a' + (i % 26));
    std::vector<Blob> payloads{sender.payload(letter)};
    const Blob part = sender.links.name(1, payloads);
    ASSERT_TRUE(receiver.links.resolve(part, payloads));
    ASSERT_EQ(letter_of(payloads[0]), letter);
  }
  EXPECT_LE(sender.links.num_held(), 1);
  EXPECT_LE(sender.memory->num_used(), kSize);
}

TEST_F(MemoryLinksTest, WithoutATicketAPayloadIsNotNamed) {
  std::vector<Blob> payloads(
      MemoryLinks::kTickets + 2, sender.payload('a', 4096));
  EXPECT_NE(sender.links.name(1, payloads).size(), 0);
  EXPECT_EQ(payloads.size(), 2);
}

TEST_F(MemoryLinksTest, ALaterSegmentIsAnnounced) {
  const size_t size = sender.memory->segments()[0]->size();
  const auto first = sender.memory->allocate(size);
  std::vector<Blob> payloads{sender.payload('a')}; // in another segment
  EXPECT_EQ(sender.memory->num_segments(), 2);
  EXPECT_TRUE(sender.links.name(1, payloads).size() == 0); // not taken yet
  receiver.links.take_descriptors();
  const Blob part = sender.links.name(1, payloads);
  ASSERT_TRUE(MemoryLinks::is_names(part));
  ASSERT_TRUE(receiver.links.resolve(part, payloads));
  EXPECT_EQ(letter_of(payloads[0]), 'a');
}

TEST_F(MemoryLinksTest, AMessageIsReadOnce) {
  std::vector<Blob> payloads{sender.payload('a')};
  const Blob part = sender.links.name(1, payloads);
  std::vector<Blob> again;
  ASSERT_TRUE(receiver.links.resolve(part, payloads));
  EXPECT_FALSE(receiver.links.resolve(part, again));
  sender.links.reclaim();
  EXPECT_EQ(sender.links.num_held(), 1); // the first one still reads
  EXPECT_EQ(letter_of(payloads[0]), 'a');
}

TEST_F(MemoryLinksTest, NamesOfAnythingElseAreRefused) {
  std::vector<Blob> payloads{sender.payload('a')};
  const Blob named = sender.links.name(1, payloads);
  const std::vector<std::byte> part(named.data(), named.data() + named.size());
  // Every byte that is not as it was: other memory, rank, count, place, ticket,
  // use, segment, offset, size. Some changes name other bytes of the memory.
  for (size_t i = 0; i < part.size(); ++i) {
    auto changed = part;
    changed[i] ^= std::byte{0x80};
    std::vector<Blob> none;
    const Blob blob = blob_of(changed);
    if (MemoryLinks::is_names(blob) && receiver.links.resolve(blob, none)) {
      ASSERT_EQ(none.size(), 1) << i;
      EXPECT_NE(letter_of(none[0]), '?'); // it can be read
    }
  }
  for (size_t size = 0; size < part.size(); ++size) {
    auto cut = part;
    cut.resize(size);
    std::vector<Blob> none;
    const Blob blob = blob_of(cut);
    EXPECT_FALSE(
        MemoryLinks::is_names(blob) && receiver.links.resolve(blob, none));
  }
}

TEST_F(MemoryLinksTest, WhatWasNotSentIsNotHeld) {
  std::vector<Blob> payloads{sender.payload('a'), sender.payload('b')};
  const auto part = sender.links.name(1, payloads);
  EXPECT_EQ(sender.links.num_held(), 2);
  sender.links.undo(1, part);
  EXPECT_EQ(sender.links.num_held(), 0);
  EXPECT_EQ(sender.memory->num_used(), 0);
  payloads = {sender.payload('c')};
  const Blob next = sender.links.name(1, payloads);
  ASSERT_TRUE(receiver.links.resolve(next, payloads));
  EXPECT_EQ(letter_of(payloads[0]), 'c');
}

TEST_F(MemoryLinksTest, IncarnationsAreThoseThatWereHeard) {
  EXPECT_FALSE(sender.links.has_heard(1, 1));
  sender.links.heard(1, 1);
  EXPECT_TRUE(sender.links.has_heard(1, 1));
  EXPECT_FALSE(sender.links.has_heard(1, 2));
  EXPECT_FALSE(sender.links.has_heard(2, 1));
}

TEST_F(MemoryLinksTest, ConnectingAgainToTheSameProcessChangesNothing) {
  std::vector<Blob> payloads{sender.payload('a')};
  const Blob part = sender.links.name(1, payloads);
  sender.connect(receiver);
  EXPECT_EQ(sender.links.num_held(), 1);
  ASSERT_TRUE(receiver.links.resolve(part, payloads));
  payloads.clear();
  sender.links.reclaim();
  EXPECT_EQ(sender.links.num_held(), 0);
}

TEST_F(MemoryLinksTest, WhoHasEndedReadsNothing) {
  std::vector<Blob> payloads{sender.payload('a')};
  const Blob part = sender.links.name(1, payloads);
  sender.links.ended(1);
  EXPECT_EQ(sender.links.num_held(), 0);
  EXPECT_EQ(sender.memory->num_used(), 0);
  payloads = {sender.payload('b')};
  EXPECT_TRUE(sender.links.name(1, payloads).size() == 0);
  EXPECT_EQ(payloads.size(), 1);
}

TEST_F(MemoryLinksTest, AnotherProcessOfARankDoesNotGetItsPredecessorsTickets) {
  std::vector<Blob> old{sender.payload('a')};
  const Blob part = sender.links.name(1, old);
  ASSERT_TRUE(receiver.links.resolve(part, old));
  Party heir(1);
  heir.connect(sender);
  sender.connect(heir);
  sender.links.take_descriptors();
  heir.links.take_descriptors();
  std::vector<Blob> payloads{sender.payload('b')};
  const Blob second = sender.links.name(1, payloads);
  ASSERT_TRUE(heir.links.resolve(second, payloads));
  EXPECT_EQ(letter_of(payloads[0]), 'b');
  EXPECT_EQ(letter_of(old[0]), 'a'); // is still kept
  EXPECT_EQ(sender.links.num_held(), 2);
  old.clear();
  sender.links.reclaim();
  EXPECT_EQ(sender.links.num_held(), 1);
}

TEST_F(MemoryLinksTest, APayloadOutlivesBoth) {
  std::vector<Blob> payloads;
  {
    Party other(2);
    other.connect(receiver);
    receiver.connect(other);
    other.links.take_descriptors();
    receiver.links.take_descriptors();
    payloads = {other.payload('a')};
    const Blob part = other.links.name(1, payloads);
    ASSERT_TRUE(receiver.links.resolve(part, payloads));
    receiver.links.ended(2);
  }
  EXPECT_EQ(letter_of(payloads[0]), 'a');
}

TEST_F(MemoryLinksTest, AForkedChildReleasesNothing) {
  std::vector<Blob> payloads{sender.payload('a')};
  const Blob part = sender.links.name(1, payloads);
  ASSERT_TRUE(receiver.links.resolve(part, payloads));
  const pid_t child = fork();
  if (child == 0) {
    const bool reads = letter_of(payloads[0]) == 'a';
    payloads.clear();
    _exit(reads ? 0 : 1);
  }
  int status = 0;
  waitpid(child, &status, 0);
  EXPECT_EQ(status, 0);
  sender.links.reclaim();
  EXPECT_EQ(sender.links.num_held(), 1);
}

bool is_rung(const Party& party) {
  uint64_t count = 0;
  return read(party.bell, &count, sizeof(count)) == sizeof(count);
}

TEST_F(MemoryLinksTest, ShortMessagesGoThroughMemory) {
  EXPECT_FALSE(receiver.links.take().has_value());
  ASSERT_TRUE(sender.links.put(1, Direction::kAnswer, {on_heap('a', 5)}));
  const auto taken = receiver.links.take();
  ASSERT_TRUE(taken.has_value());
  EXPECT_EQ(taken->rank, 0);
  EXPECT_EQ(taken->message.direction, Direction::kAnswer);
  EXPECT_EQ(letter_of(taken->message.parts[0]), 'a');
  EXPECT_FALSE(sender.links.put(2, Direction::kAnswer, {on_heap('a', 5)}));
  EXPECT_FALSE(is_rung(receiver)); // it was awake
}

TEST_F(MemoryLinksTest, TheBellWakesWhoWaits) {
  const auto put = [&] {
    ASSERT_TRUE(sender.links.put(1, Direction::kRequest, {on_heap('a', 5)}));
  };
  EXPECT_TRUE(receiver.links.wait_for_bell());
  put();
  EXPECT_TRUE(is_rung(receiver));
  receiver.links.stop_waiting();
  put();
  EXPECT_FALSE(is_rung(receiver));
  EXPECT_FALSE(receiver.links.wait_for_bell()); // there are messages
  EXPECT_TRUE(receiver.links.take().has_value());
  EXPECT_TRUE(receiver.links.take().has_value());
  EXPECT_TRUE(receiver.links.wait_for_bell());
}

TEST_F(MemoryLinksTest, WhoHasEndedGetsNoMessages) {
  sender.links.ended(1);
  EXPECT_FALSE(sender.links.put(1, Direction::kRequest, {on_heap('a', 5)}));
}

TEST(MemoryLinksOrderTest, EitherMayConnectFirst) {
  Party a(0);
  Party b(1);
  a.connect(b);
  std::vector<Blob> payloads{a.payload('a')};
  b.links.take_descriptors();
  EXPECT_TRUE(a.links.name(1, payloads).size() == 0); // b has not said a word
  b.connect(a);
  EXPECT_TRUE(a.links.name(1, payloads).size() == 0);
  a.links.take_descriptors();
  const Blob part = a.links.name(1, payloads);
  ASSERT_TRUE(MemoryLinks::is_names(part));
  ASSERT_TRUE(b.links.resolve(part, payloads));
  EXPECT_EQ(letter_of(payloads[0]), 'a');
}

TEST(MemoryLinksOrderTest, AnotherJobsMemoryIsNotTaken) {
  Party own(0);
  Party stranger(1, 'x');
  stranger.connect(own);
  own.connect(stranger);
  own.links.take_descriptors();
  stranger.links.take_descriptors();
  std::vector<Blob> payloads{own.payload('a')};
  EXPECT_TRUE(own.links.name(1, payloads).size() == 0);
  EXPECT_EQ(payloads.size(), 1);
}

TEST(MemoryLinksOrderTest, WithoutASocketPayloadsAreNotNamed) {
  Party own(0);
  own.links.connect(1, own_process(), "/nowhere/memory");
  std::vector<Blob> payloads{own.payload('a')};
  EXPECT_TRUE(own.links.name(1, payloads).size() == 0);
  EXPECT_EQ(letter_of(payloads[0]), 'a');
}

} // namespace
} // namespace torchkv::dist
