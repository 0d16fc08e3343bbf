#include "shared_memory.h"

#include <c10/util/Exception.h>
#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <iterator>
#include <random>
#include <string>
#include <utility>

#include "../../core/process.h"

namespace torchkv::dist {
namespace {

// Address space, not memory: pages come with their first use.
constexpr size_t kMinSegment = size_t{256} << 20U;
// A free range of this size is given back to the system.
constexpr size_t kTrim = size_t{1} << 20U;
constexpr unsigned kSeals = unsigned{F_SEAL_SHRINK} | unsigned{F_SEAL_GROW};

void expect_done(bool done, const char* what) {
  TORCH_CHECK(done, "shared memory: ", what, " failed: ", std::strerror(errno));
}

uint64_t random_id() {
  std::random_device random;
  return (static_cast<uint64_t>(random()) << 32U) | random();
}

} // namespace

Segment::Segment(size_t size) : size_(size), forks_(fork_count()) {
  const int file = memfd_create("torchkv", MFD_CLOEXEC | MFD_ALLOW_SEALING);
  expect_done(file >= 0, "memfd_create");
  try {
    expect_done(ftruncate(file, static_cast<off_t>(size)) == 0, "ftruncate");
    map(file, PROT_READ | PROT_WRITE);
    expect_done(
        fcntl(file, F_ADD_SEALS, kSeals | unsigned{F_SEAL_SEAL}) == 0, "fcntl");
    // What others get cannot be mapped for writing.
    const std::string path = "/proc/self/fd/" + std::to_string(file);
    file_ = open(path.c_str(), O_RDONLY | O_CLOEXEC);
    expect_done(file_ >= 0, "open");
  } catch (...) {
    close(file);
    if (data_ != nullptr) {
      munmap(data_, size_);
    }
    throw;
  }
  close(file);
}

Segment::Segment(int file, size_t size) : size_(size), forks_(fork_count()) {
  struct stat status{};
  const int seals = fcntl(file, F_GET_SEALS);
  const bool valid = size != 0 && seals >= 0 &&
      (static_cast<unsigned>(seals) & kSeals) == kSeals &&
      fstat(file, &status) == 0 && static_cast<size_t>(status.st_size) >= size;
  try {
    TORCH_CHECK(valid, "shared memory: expected a sealed file");
    map(file, PROT_READ);
  } catch (...) {
    close(file);
    throw;
  }
  close(file);
}

void Segment::map(int file, int protection) {
  void* const data =
      mmap(nullptr, size_, protection, MAP_SHARED | MAP_NORESERVE, file, 0);
  expect_done(data != MAP_FAILED, "mmap");
  data_ = static_cast<std::byte*>(data);
}

Segment::~Segment() {
  if (forks_ == fork_count()) {
    munmap(data_, size_);
  }
  if (file_ >= 0) {
    close(file_);
  }
}

std::shared_ptr<SharedMemory> SharedMemory::create(
    std::function<size_t()> available) {
  auto memory = std::make_shared<SharedMemory>(Private(), std::move(available));
  memory->take(kAlignment); // whether there is such memory
  memory->give_back(memory->arenas_[0].segment->data(), kAlignment);
  return memory;
}

SharedMemory::SharedMemory(
    Private /*private*/,
    std::function<size_t()> available)
    : id_(random_id()),
      forks_(fork_count()),
      available_(std::move(available)) {}

SharedMemory::~SharedMemory() = default;

std::shared_ptr<void> SharedMemory::allocate(size_t size) {
  size = (std::max<size_t>(size, 1) + kAlignment - 1) / kAlignment * kAlignment;
  std::byte* data = nullptr;
  try {
    const std::lock_guard lock(mutex_);
    data = take(size);
  } catch (const c10::Error& error) { // no address space, or no descriptor
    TORCH_WARN_ONCE(
        "torchkv: values travel over sockets, as no more memory can be shared: ",
        error.what_without_backtrace());
    return nullptr;
  }
  if (data == nullptr) {
    return nullptr;
  }
  return {data, [memory = shared_from_this(), size](void* block) {
            memory->give_back(static_cast<std::byte*>(block), size);
          }};
}

// First fit. REQUIRES: mutex_, or that no other thread knows this.
std::byte* SharedMemory::take(size_t size) {
  const auto take_from = [&](Arena& arena) -> std::byte* {
    for (auto at = arena.free.begin(); at != arena.free.end(); ++at) {
      if (at->second >= size) {
        const auto [offset, length] = *at;
        arena.free.erase(at);
        if (length > size) {
          arena.free.emplace(offset + size, length - size);
        }
        num_used_ += size;
        return arena.segment->data() + offset;
      }
    }
    return nullptr;
  };
  // Too much would not be an error, but the end of some process. Small blocks
  // are counted together, as asking takes time.
  const size_t num_unchecked = num_unchecked_ + size;
  if (num_unchecked >= kTrim) {
    if (available_() < num_unchecked) {
      TORCH_WARN_ONCE(
          "torchkv: values travel over sockets, as the system has no ",
          num_unchecked,
          " bytes of memory to share");
      return nullptr;
    }
    num_unchecked_ = 0;
  } else {
    num_unchecked_ = num_unchecked;
  }
  for (auto& arena : arenas_) {
    if (std::byte* const data = take_from(arena)) {
      return data;
    }
  }
  // Twice as large as all before: there are few, which other processes map.
  const size_t length = std::max({kMinSegment, size, num_total_});
  auto segment = std::make_shared<const Segment>(length);
  num_total_ += length;
  ends_.emplace(segment->data() + length, arenas_.size());
  arenas_.push_back({std::move(segment), {{0, length}}});
  return take_from(arenas_.back());
}

void SharedMemory::give_back(std::byte* data, size_t size) {
  if (forks_ != fork_count()) {
    return; // the parent still uses it
  }
  const std::lock_guard lock(mutex_);
  num_used_ -= size;
  Arena& arena = arenas_[ends_.upper_bound(data)->second];
  auto offset = static_cast<size_t>(data - arena.segment->data());
  auto next = arena.free.lower_bound(offset);
  if (next != arena.free.end() && offset + size == next->first) {
    size += next->second;
    next = arena.free.erase(next);
  }
  if (next != arena.free.begin()) {
    const auto before = std::prev(next);
    if (before->first + before->second == offset) {
      offset = before->first;
      size += before->second;
      arena.free.erase(before);
    }
  }
  arena.free.emplace(offset, size);
  if (size >= kTrim) {
    madvise(arena.segment->data() + offset, size, MADV_REMOVE);
  }
}

std::optional<Region> SharedMemory::find(const void* data, size_t size) const {
  const auto* const begin = static_cast<const std::byte*>(data);
  const std::lock_guard lock(mutex_);
  const auto at = ends_.upper_bound(begin);
  if (at == ends_.end()) {
    return std::nullopt;
  }
  const Segment& segment = *arenas_[at->second].segment;
  if (begin < segment.data() || size > static_cast<size_t>(at->first - begin)) {
    return std::nullopt;
  }
  return Region{
      at->second, static_cast<uint64_t>(begin - segment.data()), size};
}

std::vector<SegmentPtr> SharedMemory::segments() const {
  const std::lock_guard lock(mutex_);
  std::vector<SegmentPtr> result;
  result.reserve(arenas_.size());
  for (const auto& arena : arenas_) {
    result.push_back(arena.segment);
  }
  return result;
}

size_t SharedMemory::num_segments() const {
  const std::lock_guard lock(mutex_);
  return arenas_.size();
}

size_t SharedMemory::num_used() const {
  const std::lock_guard lock(mutex_);
  return num_used_;
}

} // namespace torchkv::dist
