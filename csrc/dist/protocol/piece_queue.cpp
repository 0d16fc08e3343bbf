#include "piece_queue.h"

namespace torchkv::dist {

void PieceQueue::put(Piece piece, size_t bytes, int64_t priority) {
  if (pieces_.emplace(piece, kWaits).second) {
    heap_.push({priority, ++count_, piece, bytes});
  }
}

void PieceQueue::ack(Piece piece) {
  const auto at = pieces_.find(piece);
  if (at == pieces_.end() || at->second == kWaits) {
    return;
  }
  const auto frame = frames_.find(at->second);
  pieces_.erase(at);
  if (--frame->second.num_left == 0) {
    frames_.erase(frame);
  }
}

PieceQueue::Batch PieceQueue::pop(const Config& config, Time now) {
  for (auto at = frames_.begin(); at != frames_.end();) {
    const auto& [number, frame] = *at;
    if (now - frame.sent < config.retry) {
      ++at;
      continue;
    }
    for (const Piece& piece : frame.pieces) {
      const auto own = pieces_.find(piece);
      if (own != pieces_.end() && own->second == number) {
        pieces_.erase(own);
      }
    }
    at = frames_.erase(at);
  }
  Batch batch;
  size_t bytes = 0;
  while (frames_.size() < config.credit && !heap_.empty() &&
         batch.pieces.size() < config.frame_pieces &&
         (batch.pieces.empty() || bytes < config.frame_bytes)) {
    const Waiting& next = heap_.top();
    bytes += next.bytes;
    batch.pieces.push_back(next.piece);
    heap_.pop();
  }
  if (!batch.pieces.empty()) {
    batch.frame = ++count_;
    frames_[batch.frame] = {now, batch.pieces, batch.pieces.size()};
    for (const auto& piece : batch.pieces) {
      pieces_[piece] = batch.frame;
    }
  }
  return batch;
}

} // namespace torchkv::dist
