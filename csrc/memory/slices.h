#pragma once

#include <ATen/core/Tensor.h>
#include <c10/util/ArrayRef.h>
#include <c10/util/FunctionRef.h>
#include <c10/util/SmallVector.h>

#include <cstdint>
#include <functional>
#include <utility>
#include <vector>

#include "../core/export.h"
#include "../core/place.h"
#include "../core/rule.h"
#include "../device/stream_order.h"
#include "entry.h"
#include "key_state.h"

namespace torchkv {

// Provides the memory of stored values; as Runtime::allocate. The tensor must
// be the only owner of a storage that it fills from its first byte; it may
// outlive the store.
using Allocator = std::function<at::Tensor(
    c10::IntArrayRef sizes,
    c10::IntArrayRef strides,
    c10::ScalarType dtype,
    c10::Device device)>;

// Fills a state that a rule, null: any, has not stepped yet. `weight` has its
// shape.
void init_state(
    const at::Tensor& state,
    const RuleSpec* rule,
    size_t place,
    const at::Tensor& weight);

// Allocates stored values and the state of optimizers, and copies them in and
// out.
//
// Thread safety: any thread, REQUIRES the mutex of each entry. Work on
// accelerators is ordered as StreamOrder says; no other StreamOrder of the
// thread has entered the entry.
class TORCHKV_API Slices {
 public:
  // Without an allocator, stored values are allocated by the runtime.
  explicit Slices(Streams& streams, Allocator allocator = {})
      : streams_(streams),
        runtime_(streams.runtime),
        allocator_(std::move(allocator)) {}

  // Gives a new entry one slice at `home`, with a copy of `value`.
  void store(Entry& entry, const at::Tensor& value, const Place& home);
  // Gives a new entry one slice, whose value is the caller's tensor. REQUIRES:
  // it is dense and plain.
  void share(Entry& entry, const at::Tensor& value);
  // After an update of entries that may be shared: autograd and the caller see
  // that the tensor was written.
  static void note_written(const Entry& entry);
  // Before a step of a slice with a master: the caller's writes to a shared
  // value count, and so does a value to which a loaded master does not belong.
  // The master takes over the value's elements to which its own do not round.
  // REQUIRES: as merge_buffer.
  static void follow_writes(const Slice& slice);

  // The tensor, or a copy of it, with the memory layout of the stored value.
  at::Tensor laid_out_as(const Entry& entry, const at::Tensor& tensor);

  // Replaces the value and, unless `keep_master`, the optimizer's copy of it,
  // and keeps the rest of the state. REQUIRES: of the entry's shape and memory
  // layout, and of a dtype that converts.
  void assign(Entry& entry, const at::Tensor& value, bool keep_master);
  // Whether the optimizer's copy is the same value with more bits, which a
  // value of the stored dtype need not replace. REQUIRES: as assign.
  bool master_rounds_to(Entry& entry, const at::Tensor& value);

  // The stored value as a tensor that the store no longer writes: updates use
  // new memory while the tensor's storage is in use. Sharded and shared values
  // and those on accelerators are copied. REQUIRES: readers do not write it.
  at::Tensor lease(Entry& entry);
  // Before an update: moves leased values to new memory.
  void end_leases(Entry& entry) {
    for (auto& slice : entry.slices) {
      if (slice.is_leased) {
        end_lease(slice);
      }
    }
  }

  // A slice with uninitialised memory. REQUIRES: `order` outlives all use of it
  // by this call.
  Slice make_slice(
      const Entry& entry,
      const Place& home,
      int64_t begin,
      int64_t end,
      StreamOrder& order);
  // Copies the elements that both slices hold, with the optimizer's state.
  void copy_common(Slice& from, Slice& to, StreamOrder& order);

  // The tensors of a slice, created if needed. REQUIRES: a StreamOrder has
  // entered the slice.
  at::Tensor& merge_buffer(Slice& slice);
  at::Tensor& accumulated(Slice& slice);
  // Creates missing state of the rule and appends it to `made`. Returns whether
  // all states existed.
  bool prepare_state(
      Slice& slice,
      const RuleSpec& rule,
      std::vector<at::Tensor*>& made);

  // Copies of an entry's optimizer state, of a row-sparse value by slot.
  // REQUIRES for set_state: the rule's names, and tensors of the value's shape.
  KeyState state_of(Entry& entry, const RuleSpec& rule);
  void set_state(Entry& entry, const RuleSpec& rule, const KeyState& state);
  void clear_state(Entry& entry);

  // A new whole tensor like the stored value, of a row-sparse one with the rows
  // that it has, of any dtype.
  at::Tensor empty_like(
      const Entry& entry,
      c10::ScalarType dtype,
      c10::Device device);
  // A copy of the stored value, ordered with the current stream of `device`.
  at::Tensor copy_of(Entry& entry, c10::Device device);

  // Copies tensors of one shape; one of them may be a slice's. REQUIRES: as
  // merge_buffer, or both are in CPU memory.
  void copy(const at::Tensor& destination, const at::Tensor& source);

  // For a StreamOrder.
  Streams& streams() const {
    return streams_;
  }

 private:
  at::Tensor allocate_value(
      c10::IntArrayRef sizes,
      c10::IntArrayRef strides,
      c10::ScalarType dtype,
      c10::Device device);
  at::Tensor allocate_like(const at::Tensor& model, c10::ScalarType dtype);
  void end_lease(Slice& slice);
  at::Tensor gathered(
      Entry& entry,
      c10::function_ref<const at::Tensor&(const Slice&)> member,
      c10::Device device);
  void copy_shard(
      const Slice& slice,
      const at::Tensor& destination,
      const at::Tensor& whole,
      StreamOrder& order);

  Streams& streams_;
  Runtime& runtime_;
  const Allocator allocator_;
};

} // namespace torchkv
