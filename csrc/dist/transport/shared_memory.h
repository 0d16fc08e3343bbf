#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <vector>

#include "../../core/export.h"
#include "../protocol/message.h"
#include "available_memory.h"

namespace torchkv::dist {

// A mapped file of anonymous memory (memfd). It never changes its size, which
// its seals guarantee to every process that maps it. A forked child inherits
// the mapping and leaves it alone, so that it can read what its parent has
// kept.
class TORCHKV_API Segment {
 public:
  // Of a file of one's own, for reading and writing. Throws std::system_error.
  explicit Segment(size_t size);
  // Of a file of another process, for reading; takes the descriptor. Throws
  // std::runtime_error unless it is a sealed one of at least `size` bytes.
  Segment(int file, size_t size);
  Segment(const Segment&) = delete;
  Segment& operator=(const Segment&) = delete;
  ~Segment();

  std::byte* data() const {
    return data_;
  }
  size_t size() const {
    return size_;
  }
  // That of a file of one's own. Others can read through it only.
  int file() const {
    return file_;
  }

 private:
  void map(int file, int protection);

  size_t size_;
  uint64_t forks_;
  std::byte* data_ = nullptr;
  int file_ = -1;
};
using SegmentPtr = std::shared_ptr<const Segment>;

// Memory of this process that others of its host can read. Blocks refer to it:
// it lives as long as any of them. Thread-safe.
class TORCHKV_API SharedMemory
    : public std::enable_shared_from_this<SharedMemory> {
 private:
  struct Private {};

 public:
  // RuntimeError where the system has no such memory. `available`: the bytes
  // that the process may still use.
  static std::shared_ptr<SharedMemory> create(
      std::function<size_t()> available = [] { return available_memory(); });
  SharedMemory(Private, std::function<size_t()> available);
  SharedMemory(const SharedMemory&) = delete;
  SharedMemory& operator=(const SharedMemory&) = delete;
  ~SharedMemory();

  // Identifies it among those of all processes.
  uint64_t id() const {
    return id_;
  }
  // A block at a multiple of kAlignment, of unspecified content; null where the
  // system has not enough memory.
  std::shared_ptr<void> allocate(size_t size);
  // Where bytes lie, if in this memory. Region::segment: index in segments().
  std::optional<Region> find(const void* data, size_t size) const;
  // Those so far; further ones are appended.
  std::vector<SegmentPtr> segments() const;
  size_t num_segments() const;
  // Bytes of the blocks.
  size_t num_used() const;

  static constexpr size_t kAlignment = 4096;

 private:
  struct Arena {
    SegmentPtr segment;
    std::map<size_t, size_t> free; // offset -> size
  };
  std::byte* take(size_t size);
  void give_back(std::byte* data, size_t size);

  const uint64_t id_;
  const uint64_t forks_;
  const std::function<size_t()> available_;
  mutable std::mutex mutex_; // guards the rest
  std::vector<Arena> arenas_;
  std::map<const std::byte*, size_t> ends_; // of segments -> index
  size_t num_used_ = 0;
  size_t num_total_ = 0;
  size_t num_unchecked_ = 0; // of the bytes since available_ was asked
};

} // namespace torchkv::dist
