#include "memory.h"

#include <c10/util/Exception.h>
#include <c10/util/SmallVector.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <map>
#include <memory>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "devices.h"
#include "graph.h"

namespace torchkv::mock_cuda {
namespace {

constexpr int kPoison = 0xFF; // NaN in every floating-point dtype, -1

// All memory on a device begins at a multiple of it.
constexpr size_t kAlignment = 512;

struct Block {
  c10::Stream stream; // of the allocation
  size_t num_bytes;
  bool is_live;
  History history; // since the allocation
  std::vector<c10::Stream> kept_for;
  int num_owners = 1; // a tensor, and the graph that it was allocated for
};

struct Memory {
  std::map<uintptr_t, Block> blocks; // by first byte; the freed ones, too
  using Size = std::tuple<c10::DeviceIndex, c10::StreamId, size_t>;
  std::map<Size, std::vector<uintptr_t>> freed;
  int64_t num_live = 0;
};

Memory& memory() {
  static auto* memory = new Memory(); // used by static destructors
  return *memory;
}

uintptr_t address_of(const void* data) {
  return reinterpret_cast<uintptr_t>(data);
}

void* pointer_to(uintptr_t address) {
  return reinterpret_cast<void*>(address); // NOLINT(performance-no-int-to-ptr)
}

Memory::Size size_of(const Block& block) {
  return {block.stream.device_index(), block.stream.id(), block.num_bytes};
}

// The block that holds an address, null if there is none.
Block* find_block(uintptr_t address) {
  auto& blocks = memory().blocks;
  const auto after = blocks.upper_bound(address);
  if (after == blocks.begin()) {
    return nullptr;
  }
  const auto it = std::prev(after);
  return address < it->first + it->second.num_bytes ? &it->second : nullptr;
}

// Later work on the block's stream may reuse it, after the current work of the
// streams that it is kept for.
void check_free(const Block& block) {
  Clock clock = clock_of(block.stream);
  clock.join(host_clock());
  for (const auto& stream : block.kept_for) {
    clock.join(clock_of(stream));
  }
  const WorkPtr work = block.history.uncovered(clock);
  if (work != nullptr) {
    note_mistake(
        c10::str(
            "mock_cuda: memory of ",
            place_of(block.stream),
            " was freed while ",
            work->text(),
            " may still use it"));
  }
}

void let_go(void* data, bool is_idle) {
  const std::lock_guard lock(mutex());
  const uintptr_t address = address_of(data);
  Block& block = memory().blocks.at(address);
  if (--block.num_owners > 0) {
    return;
  }
  if (!is_idle) {
    check_free(block);
  }
  std::memset(data, kPoison, block.num_bytes);
  block.is_live = false;
  --memory().num_live;
  memory().freed[size_of(block)].push_back(address);
}

void free_block(void* data) {
  if (data != nullptr) {
    let_go(data, /*is_idle=*/false);
  }
}

void* allocate_block(size_t num_bytes, c10::Stream stream) {
  const std::lock_guard lock(mutex());
  int64_t& left = allocations_left();
  TORCH_CHECK_WITH(OutOfMemoryError, left != 0, "mock_cuda: no memory is left");
  left -= left > 0 ? 1 : 0;
  ++counters().allocations;
  ++memory().num_live;
  Block block{stream, num_bytes, true, {}, {}};
  const auto& capture = capture_of(stream);
  auto& freed = memory().freed[size_of(block)];
  uintptr_t address = 0;
  if (freed.empty()) {
    address = address_of(
        std::aligned_alloc(
            kAlignment,
            (num_bytes + kAlignment - 1) / kAlignment * kAlignment));
  } else {
    address = freed.back();
    freed.pop_back();
  }
  std::memset(pointer_to(address), kPoison, num_bytes);
  if (capture != nullptr) {
    capture->keep(pointer_to(address));
    ++block.num_owners;
  }
  memory().blocks.insert_or_assign(address, std::move(block));
  return pointer_to(address);
}

class DeviceAllocator final : public c10::Allocator {
 public:
  c10::DataPtr allocate(size_t num_bytes) override {
    const c10::Device device = current_device();
    void* data = num_bytes == 0
        ? nullptr
        : allocate_block(num_bytes, current_stream(device));
    return {data, data, &free_block, device};
  }
  c10::DeleterFnPtr raw_deleter() const override {
    return &free_block;
  }
  void copy_data(void* to, const void* from, std::size_t num_bytes)
      const override {
    default_copy_data(to, from, num_bytes);
  }
};

const bool registered = [] {
  c10::SetAllocator(c10::kCUDA, &allocator());
  return true;
}();

} // namespace

c10::Allocator& allocator() {
  static auto* allocator = new DeviceAllocator(); // as memory()
  return *allocator;
}

void access(
    const WorkPtr& work,
    c10::Stream stream,
    const void* begin,
    size_t num_bytes,
    bool is_write,
    Reach reach) {
  check();
  if (num_bytes == 0) {
    return;
  }
  const uintptr_t address = address_of(begin);
  Block* block = find_block(address);
  const auto what = [&] { return "mock_cuda: " + work->text() + " touches "; };
  TORCH_CHECK(block != nullptr, what(), "memory that is no device's");
  TORCH_CHECK(
      block->is_live,
      what(),
      "memory of ",
      place_of(block->stream),
      " that was freed");
  TORCH_CHECK(
      find_block(address + num_bytes - 1) == block,
      what(),
      "memory behind the end of its block");
  TORCH_CHECK(
      reach == Reach::kAll ||
          has_peer_access(stream.device_index(), block->stream.device_index()),
      what(),
      "memory of ",
      place_of(block->stream),
      " without peer access to it");
  block->history.access(
      address, address + num_bytes, is_write, work, clock_of(stream));
}

void access(
    const WorkPtr& work,
    c10::Stream stream,
    const at::Tensor& tensor,
    bool is_write,
    Reach reach) {
  for_each_run(tensor, [&](const char* begin, size_t num_bytes) {
    access(work, stream, begin, num_bytes, is_write, reach);
  });
}

void keep_until_done(const void* data, c10::Stream stream) {
  const std::lock_guard lock(mutex());
  Block* block = find_block(address_of(data));
  if (block != nullptr) { // else a tensor without elements
    block->kept_for.push_back(stream);
  }
}

void release(void* data) {
  let_go(data, /*is_idle=*/true);
}

int64_t num_live_blocks() {
  return memory().num_live;
}

void forget_blocks() {
  for (const auto& [address, block] : memory().blocks) {
    std::free(pointer_to(address));
  }
  memory() = Memory();
}

void for_each_run(
    const at::Tensor& tensor,
    c10::function_ref<void(const char* begin, size_t num_bytes)> visit) {
  if (tensor.numel() == 0) {
    return;
  }
  struct Dim {
    int64_t stride; // bytes
    int64_t size;
  };
  c10::SmallVector<Dim, 4> dims; // without the innermost, which are one run
  const auto element_size = static_cast<int64_t>(tensor.element_size());
  for (int64_t i = 0; i < tensor.dim(); ++i) {
    if (tensor.size(i) > 1 && tensor.stride(i) != 0) {
      dims.push_back({tensor.stride(i) * element_size, tensor.size(i)});
    }
  }
  std::sort(dims.begin(), dims.end(), [](const Dim& a, const Dim& b) {
    return a.stride < b.stride;
  });
  int64_t run = element_size;
  const auto* outer = dims.begin();
  while (outer != dims.end() && outer->stride == run) {
    run *= outer->size;
    ++outer;
  }
  const auto* data = static_cast<const char*>(tensor.const_data_ptr());
  int64_t num_runs = 1;
  for (const auto* dim = outer; dim != dims.end(); ++dim) {
    num_runs *= dim->size;
  }
  for (int64_t i = 0; i < num_runs; ++i) {
    int64_t offset = 0;
    int64_t rest = i;
    for (const auto* dim = outer; dim != dims.end(); ++dim) {
      offset += rest % dim->size * dim->stride;
      rest /= dim->size;
    }
    visit(data + offset, static_cast<size_t>(run));
  }
}

} // namespace torchkv::mock_cuda
