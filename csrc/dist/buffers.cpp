#include "buffers.h"

#include <ATen/EmptyTensor.h>
#include <ATen/ops/from_blob.h>
#include <c10/core/CPUAllocator.h>
#include <c10/core/InferenceMode.h>

#include <algorithm>
#include <mutex>
#include <unordered_map>
#include <utility>
#include <vector>

#include "../core/plain_dispatch.h"
#include "byte_counts.h"

namespace torchkv::dist {
namespace {

// A tensor over memory that `owner` keeps: as at::from_blob, without the
// allocations that a std::function takes.
template <class Owner>
at::Tensor tensor_over(
    void* data,
    c10::IntArrayRef sizes,
    c10::OptionalIntArrayRef strides, // none: contiguous
    c10::ScalarType dtype,
    std::unique_ptr<Owner> owner) {
  return at::for_blob(data, sizes)
      .strides(strides)
      .context(
          owner.release(), [](void* held) { delete static_cast<Owner*>(held); })
      .options(dtype)
      .make_tensor();
}

} // namespace

struct Buffers::Pool {
  // Of the bytes that are free, at most as many as are in use, or have been if
  // pinned, are kept, and kKept.
  static constexpr size_t kKept = size_t{64} << 20U;

  // What a block of memory needs until it is freed.
  struct Block {
    std::shared_ptr<void> memory;
    std::shared_ptr<void> pin; // freed first
  };

  Pool(std::shared_ptr<SharedMemory> shared, Runtime* pins_with)
      : memory(std::move(shared)), runtime(pins_with) {}

  const std::shared_ptr<SharedMemory> memory; // may be null
  Runtime* const runtime; // that pins memory, or null

  std::mutex mutex; // guards the rest
  std::unordered_map<size_t, std::vector<c10::DataPtr>> free;
  size_t num_free = 0; // bytes
  size_t num_used = 0;
  size_t num_most = 0; // of num_used, where memory is pinned

  c10::DataPtr allocate(size_t size, std::optional<c10::Device> device) const {
    if (memory != nullptr && size >= SharedMemory::kAlignment) {
      if (auto block = memory->allocate(size)) {
        void* const data = block.get();
        auto pinned = device ? runtime->pin(data, size, *device) : nullptr;
        return {
            data,
            new Block{std::move(block), std::move(pinned)},
            [](void* held) { delete static_cast<Block*>(held); },
            c10::Device(c10::DeviceType::CPU)};
      }
    }
    return c10::GetCPUAllocator()->allocate(size);
  }

  // REQUIRES: no device if nothing pins memory.
  c10::DataPtr take(size_t size, std::optional<c10::Device> device) {
    {
      const std::lock_guard lock(mutex);
      auto& list = free[size];
      if (!list.empty()) {
        c10::DataPtr data = std::move(list.back());
        list.pop_back();
        num_free -= size;
        add_used(size);
        return data;
      }
    }
    c10::DataPtr data = allocate(size, device);
    const std::lock_guard lock(mutex);
    add_used(size);
    return data;
  }

  void add_used(size_t size) {
    num_used += size;
    num_most = runtime != nullptr ? std::max(num_most, num_used) : 0;
  }

  void give_back(c10::DataPtr data, size_t size) {
    const std::lock_guard lock(mutex);
    num_used -= size;
    if (num_free + size <= std::max({num_used, num_most, kKept})) {
      num_free += size;
      free[size].push_back(std::move(data));
    }
  }
};

Buffers::Buffers(std::shared_ptr<SharedMemory> memory)
    : pool_(std::make_shared<Pool>(std::move(memory), nullptr)) {}

Buffers::Buffers(std::shared_ptr<SharedMemory> memory, Runtime& runtime)
    : pool_(std::make_shared<Pool>(std::move(memory), &runtime)) {}

at::Tensor Buffers::empty(c10::IntArrayRef sizes, c10::ScalarType dtype) const {
  return empty(sizes, dtype, std::nullopt);
}

at::Tensor Buffers::empty_codes(int64_t num_bytes) const {
  int64_t step = 64; // of sizes: an eighth of them at most
  while (step * 16 <= num_bytes) {
    step *= 2;
  }
  const PlainDispatch plain;
  return empty((num_bytes + step - 1) / step * step, c10::kByte)
      .narrow(0, 0, num_bytes);
}

at::Tensor Buffers::empty_for(
    c10::Device device,
    c10::IntArrayRef sizes,
    c10::ScalarType dtype) const {
  return empty(sizes, dtype, device);
}

at::Tensor Buffers::empty(
    c10::IntArrayRef sizes,
    c10::ScalarType dtype,
    std::optional<c10::Device> device) const {
  return empty_strided(sizes, std::nullopt, dtype, device);
}

at::Tensor Buffers::empty_strided(
    c10::IntArrayRef sizes,
    c10::OptionalIntArrayRef strides,
    c10::ScalarType dtype,
    std::optional<c10::Device> device) const {
  struct Held {
    std::shared_ptr<Pool> pool;
    c10::DataPtr data;
    size_t bytes;

    ~Held() {
      pool->give_back(std::move(data), bytes);
    }
  };
  const auto bytes = static_cast<size_t>(c10::multiply_integers(sizes)) *
      c10::elementSize(dtype);
  std::unique_ptr<Held> held(
      new Held{pool_, pool_->take(bytes, device), bytes});
  void* const address = held->data.get();
  return tensor_over(address, sizes, strides, dtype, std::move(held));
}

bool Buffers::are_shared() const {
  return pool_->memory != nullptr;
}

Allocator Buffers::allocator() const {
  return [buffers = *this](
             c10::IntArrayRef sizes,
             c10::IntArrayRef strides,
             c10::ScalarType dtype,
             c10::Device /*device*/) {
    // As Runtime::allocate.
    const c10::InferenceMode normal(false);
    const PlainDispatch plain;
    const at::Tensor memory =
        buffers.empty_strided(sizes, strides, dtype, std::nullopt);
    byte_counts().allocated += static_cast<int64_t>(memory.nbytes());
    return memory;
  };
}

LocalStore::Options store_options(const Buffers& buffers) {
  LocalStore::Options options;
  options.allocator = buffers.allocator();
  return options;
}

Blob blob_of(const at::Tensor& tensor) {
  return {
      std::make_shared<const at::Tensor>(tensor),
      tensor.const_data_ptr(),
      tensor.nbytes()};
}

Blobs cut(const Blob& blob, size_t piece_bytes) {
  Blobs pieces;
  size_t begin = 0;
  do {
    const size_t size = std::min(piece_bytes, blob.size() - begin);
    pieces.push_back(blob.slice(begin, size));
    begin += size;
  } while (begin < blob.size());
  return pieces;
}

void copy_pieces(c10::ArrayRef<Blob> pieces, void* destination) {
  kernels::cpu::CopyBatch batch;
  add_copies(batch, pieces, destination);
  batch.run();
}

void add_copies(
    kernels::cpu::CopyBatch& batch,
    c10::ArrayRef<Blob> pieces,
    c10::ArrayRef<void*> destinations,
    size_t begin) {
  for (const auto& piece : pieces) {
    for (void* const destination : destinations) {
      if (piece.size() != 0) {
        batch.add(
            piece.data(),
            piece.size(),
            static_cast<std::byte*>(destination) + begin);
      }
    }
    begin += piece.size();
  }
}

at::Tensor joined_codes(c10::ArrayRef<Blob> pieces, const Buffers& buffers) {
  size_t size = 0;
  for (const auto& piece : pieces) {
    size += piece.size();
  }
  at::Tensor result = buffers.empty_codes(static_cast<int64_t>(size));
  copy_pieces(pieces, result.mutable_data_ptr());
  byte_counts().joined += static_cast<int64_t>(size);
  return result;
}

void check_size(
    c10::ArrayRef<Blob> pieces,
    c10::IntArrayRef sizes,
    c10::ScalarType dtype) {
  size_t num_bytes = 0;
  for (const auto& piece : pieces) {
    num_bytes += piece.size();
  }
  const size_t expected = static_cast<size_t>(c10::multiply_integers(sizes)) *
      c10::elementSize(dtype);
  TORCH_CHECK_VALUE(
      num_bytes == expected,
      "expected ",
      expected,
      " bytes, a value of sizes ",
      sizes,
      " and dtype ",
      dtype,
      ", but got ",
      num_bytes);
}

at::Tensor tensor_of(
    c10::ArrayRef<Blob> pieces,
    c10::IntArrayRef sizes,
    c10::ScalarType dtype,
    const Buffers& buffers) {
  const size_t item = c10::elementSize(dtype);
  check_size(pieces, sizes, dtype);
  bool is_one = reinterpret_cast<uintptr_t>(pieces[0].data()) % item == 0;
  for (size_t i = 1; is_one && i < pieces.size(); ++i) {
    is_one = pieces[i].data() == pieces[i - 1].data() + pieces[i - 1].size();
  }
  if (is_one && pieces[0].size() != 0) {
    auto* const data = const_cast<std::byte*>(pieces[0].data());
    if (pieces.size() == 1) {
      auto owner = std::make_unique<Blob>(pieces[0]);
      return tensor_over(data, sizes, std::nullopt, dtype, std::move(owner));
    }
    auto owners = std::make_unique<Blobs>(pieces.begin(), pieces.end());
    return tensor_over(data, sizes, std::nullopt, dtype, std::move(owners));
  }
  at::Tensor result = buffers.empty(sizes, dtype);
  copy_pieces(pieces, result.mutable_data_ptr());
  byte_counts().joined += static_cast<int64_t>(result.nbytes());
  return result;
}

} // namespace torchkv::dist
