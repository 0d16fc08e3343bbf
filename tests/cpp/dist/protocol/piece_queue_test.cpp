// PieceQueue: priority, frames, credit.
#include "dist/protocol/piece_queue.h"

#include <gtest/gtest.h>

#include <vector>

namespace torchkv::dist {
namespace {

using Pieces = std::vector<PieceQueue::Piece>;

Config small_frames() {
  Config config;
  config.frame_pieces = 2;
  config.frame_bytes = 100;
  config.credit = 2;
  config.retry = 1;
  return config;
}

TEST(PieceQueueTest, HighestPriorityFirstThenInOrder) {
  PieceQueue queue;
  queue.put({1, 0}, 1, 0);
  queue.put({2, 0}, 1, 5);
  queue.put({3, 0}, 1, -5);
  queue.put({4, 0}, 1, 5);
  EXPECT_EQ(queue.pop(small_frames(), 0).pieces, (Pieces{{2, 0}, {4, 0}}));
  EXPECT_EQ(queue.pop(small_frames(), 0).pieces, (Pieces{{1, 0}, {3, 0}}));
}

// Their numbers make a table grow without end that adds them up before it mixes
// them: (1, 31) and (2, 0) would be one.
TEST(PieceQueueTest, ManyPiecesOfConsecutiveOperations) {
  constexpr int64_t kOperations = 64;
  constexpr int32_t kPieces = 1024;
  Config config;
  config.frame_bytes = size_t{1} << 30U;
  config.frame_pieces = size_t{1} << 30U;
  PieceQueue queue;
  for (int64_t opno = 1; opno <= kOperations; ++opno) {
    for (int32_t i = 0; i < kPieces; ++i) {
      queue.put({opno, i}, 1, 0);
      queue.put({opno, i}, 1, 0);
    }
  }
  const auto batch = queue.pop(config, 0);
  EXPECT_EQ(batch.pieces.size(), size_t{kOperations} * kPieces);
  for (const auto& piece : batch.pieces) {
    queue.ack(piece);
  }
  queue.put({1, 0}, 1, 0);
  EXPECT_EQ(queue.pop(config, 0).pieces, (Pieces{{1, 0}}));
}

TEST(PieceQueueTest, AFrameClosesAtItsBytes) {
  Config config = small_frames();
  config.frame_pieces = 10;
  PieceQueue queue;
  for (int32_t i = 0; i < 5; ++i) {
    queue.put({1, i}, 60, 0);
  }
  EXPECT_EQ(queue.pop(config, 0).pieces, (Pieces{{1, 0}, {1, 1}}));
  queue.put({2, 0}, 1000, 1); // larger than a frame: a frame of its own
  EXPECT_EQ(queue.pop(config, 0).pieces, (Pieces{{2, 0}}));
}

TEST(PieceQueueTest, CreditCountsFramesUntilAllTheirPiecesAreAcknowledged) {
  PieceQueue queue;
  for (int32_t i = 0; i < 6; ++i) {
    queue.put({1, i}, 1, 0);
  }
  const auto first = queue.pop(small_frames(), 0);
  const auto second = queue.pop(small_frames(), 0);
  EXPECT_NE(first.frame, second.frame);
  EXPECT_TRUE(queue.pop(small_frames(), 0).pieces.empty());
  queue.ack({1, 0});
  EXPECT_TRUE(queue.pop(small_frames(), 0).pieces.empty());
  queue.ack({1, 0});
  queue.ack({1, 5}); // waits
  queue.ack({7, 7}); // unknown
  EXPECT_TRUE(queue.pop(small_frames(), 0).pieces.empty());
  queue.ack({1, 1});
  EXPECT_EQ(queue.pop(small_frames(), 0).pieces, (Pieces{{1, 4}, {1, 5}}));
}

TEST(PieceQueueTest, ASilentFrameGivesItsCreditBack) {
  PieceQueue queue;
  for (int32_t i = 0; i < 6; ++i) {
    queue.put({1, i}, 1, 0);
  }
  queue.pop(small_frames(), 0);
  queue.pop(small_frames(), 0.5);
  EXPECT_TRUE(queue.pop(small_frames(), 0.9).pieces.empty());
  EXPECT_EQ(queue.pop(small_frames(), 1).pieces, (Pieces{{1, 4}, {1, 5}}));
  // The silent pieces are not in flight any more: they may be put again.
  queue.put({1, 0}, 1, 0);
  queue.put({1, 2}, 1, 0); // in flight until 1.5
  EXPECT_EQ(queue.pop(small_frames(), 1.5).pieces, (Pieces{{1, 0}}));
}

TEST(PieceQueueTest, APieceWaitsOnce) {
  PieceQueue queue;
  queue.put({1, 0}, 1, 0);
  queue.put({1, 0}, 1, 9);
  EXPECT_EQ(queue.pop(small_frames(), 0).pieces, (Pieces{{1, 0}}));
  queue.put({1, 0}, 1, 0); // in flight
  EXPECT_TRUE(queue.pop(small_frames(), 0).pieces.empty());
  queue.ack({1, 0});
  queue.put({1, 0}, 1, 0);
  EXPECT_EQ(queue.pop(small_frames(), 0).pieces, (Pieces{{1, 0}}));
}

} // namespace
} // namespace torchkv::dist
