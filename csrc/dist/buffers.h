#pragma once

#include <ATen/core/Tensor.h>

#include <memory>
#include <optional>

#include "../core/export.h"
#include "../kernels/cpu/copy_batch.h"
#include "../store/local_store.h"
#include "protocol/blob.h"
#include "transport/shared_memory.h"

namespace torchkv::dist {

// Reuses CPU memory of tensors: memory that is fresh from the system costs more
// than a copy does, as each page is mapped at its first touch. Copies share the
// memory; what is not in use when the last copy is gone is freed. Thread-safe.
class TORCHKV_API Buffers {
 public:
  // Of `memory`, where it has some; null: as torch's tensors.
  explicit Buffers(std::shared_ptr<SharedMemory> memory = nullptr);
  // Of `memory`, which empty_for() pins. As this is slow, as much is kept as
  // was ever in use.
  Buffers(std::shared_ptr<SharedMemory> memory, Runtime& runtime);

  // A contiguous tensor with uninitialised memory, to which nothing else
  // refers.
  at::Tensor empty(c10::IntArrayRef sizes, c10::ScalarType dtype) const;
  // Bytes of codes, whose number varies: a block that is somewhat larger, so
  // that others can use it afterwards.
  at::Tensor empty_codes(int64_t num_bytes) const;
  // The same as empty(), for copies from an accelerator.
  at::Tensor empty_for(
      c10::Device device,
      c10::IntArrayRef sizes,
      c10::ScalarType dtype) const;
  // The same for a LocalStore.
  Allocator allocator() const;
  // Whether other processes may read the memory.
  bool are_shared() const;

 private:
  struct Pool;
  at::Tensor empty(
      c10::IntArrayRef sizes,
      c10::ScalarType dtype,
      std::optional<c10::Device> device) const;
  at::Tensor empty_strided(
      c10::IntArrayRef sizes,
      c10::OptionalIntArrayRef strides, // none: contiguous
      c10::ScalarType dtype,
      std::optional<c10::Device> device) const;
  std::shared_ptr<Pool> pool_;
};

// Of a store whose values are in buffers.
LocalStore::Options store_options(const Buffers& buffers);

// The tensor's memory. REQUIRES: contiguous, on the CPU.
TORCHKV_API Blob blob_of(const at::Tensor& tensor);

// ValueError if the pieces are not such a value's: what another rank says of
// its dtype and of the number of its bytes may disagree.
void check_size(
    c10::ArrayRef<Blob> pieces,
    c10::IntArrayRef sizes,
    c10::ScalarType dtype);

// The pieces as one tensor: without a copy if they are one aligned memory.
// Throws what check_size() throws.
TORCHKV_API at::Tensor tensor_of(
    c10::ArrayRef<Blob> pieces,
    c10::IntArrayRef sizes,
    c10::ScalarType dtype,
    const Buffers& buffers);

// A copy of the pieces, in empty_codes().
at::Tensor joined_codes(c10::ArrayRef<Blob> pieces, const Buffers& buffers);

// Copies the pieces, one after the other, to `destination`.
void copy_pieces(c10::ArrayRef<Blob> pieces, void* destination);
// Adds copies of the pieces, one after the other, to each destination, so many
// bytes behind its beginning.
void add_copies(
    kernels::cpu::CopyBatch& batch,
    c10::ArrayRef<Blob> pieces,
    c10::ArrayRef<void*> destinations,
    size_t begin = 0);

// `blob` in pieces of `piece_bytes`; at least one.
TORCHKV_API Blobs cut(const Blob& blob, size_t piece_bytes);

} // namespace torchkv::dist
