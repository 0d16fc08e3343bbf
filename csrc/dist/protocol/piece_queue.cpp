#include "piece_queue.h"

namespace torchkv::dist {

void PieceQueue::put(Piece piece, size_t bytes, int64_t priority) {
  if (flying_.count(piece) != 0 || !waiting_.insert(piece).second) {
    return;
  }
  heap_.push({priority, ++count_, piece, bytes});
}

void PieceQueue::ack(Piece piece) {
  const auto at = flying_.find(piece);
  if (at == flying_.end()) {
    return;
  }
  const auto frame = frames_.find(at->second);
  flying_.erase(at);
  frame->second.pieces.erase(piece);
  if (frame->second.pieces.empty()) {
    frames_.erase(frame);
  }
}

PieceQueue::Batch PieceQueue::pop(const Config& config, Time now) {
  for (auto at = frames_.begin(); at != frames_.end();) {
    if (now - at->second.sent >= config.retry) {
      for (const auto& piece : at->second.pieces) {
        flying_.erase(piece);
      }
      at = frames_.erase(at);
    } else {
      ++at;
    }
  }
  Batch batch;
  size_t bytes = 0;
  while (frames_.size() < config.credit && !heap_.empty() &&
         batch.pieces.size() < config.frame_pieces &&
         (batch.pieces.empty() || bytes < config.frame_bytes)) {
    const Waiting& next = heap_.top();
    bytes += next.bytes;
    waiting_.erase(next.piece);
    batch.pieces.push_back(next.piece);
    heap_.pop();
  }
  if (!batch.pieces.empty()) {
    batch.frame = ++count_;
    auto& frame = frames_[batch.frame];
    frame.sent = now;
    for (const auto& piece : batch.pieces) {
      frame.pieces.insert(piece);
      flying_.emplace(piece, batch.frame);
    }
  }
  return batch;
}

} // namespace torchkv::dist
