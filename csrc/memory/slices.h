#pragma once

#include <ATen/core/Tensor.h>
#include <c10/util/ArrayRef.h>
#include <c10/util/FunctionRef.h>
#include <c10/util/SmallVector.h>

#include <atomic>
#include <cstdint>
#include <memory>
#include <mutex>
#include <utility>
#include <vector>

#include "../core/export.h"
#include "../core/place.h"
#include "../core/rule.h"
#include "../device/runtime.h"
#include "../device/stream_order.h"
#include "../update/optimizer.h"
#include "cut.h"
#include "entry.h"
#include "item.h"
#include "places.h"

namespace torchkv {

// The memory of stored values: makes, places, cuts and gathers it, and takes
// copies in and out.
//
// Thread safety: any thread, REQUIRES the mutex of each entry. Work on
// accelerators is ordered as StreamOrder says; no other StreamOrder of the
// thread has entered the entry.
class TORCHKV_API Slices {
 public:
  // Where values live.
  enum class Policy : uint8_t {
    kCpu, // in CPU memory
    // Where their first value is, until a call brings tensors at several
    // places: then all values of the call are cut as one, evenly.
    kCutAll,
    // The same, but each value is cut by itself, into pieces of one size.
    kCutEach,
  };

  Slices(Policy policy, Runtime& runtime, EventPool& events, Places& places)
      : policy_(policy), runtime_(runtime), events_(events), places_(places) {}

  // Gives a new entry its value, a copy of `value`.
  void store(Entry& entry, const at::Tensor& value);

  // As Comm::place.
  void place(c10::ArrayRef<Item> items, bool may_cut);

  // Makes one slice of all, which the next call that may cut cuts again.
  void gather(Entry& entry);

  // Takes over the entry of another store.
  void adopt(Entry& entry);

  // The tensors of a slice, made where there are none. REQUIRES: a StreamOrder
  // has entered the slice.
  at::Tensor& merge_buffer(Slice& slice);
  at::Tensor& accumulated(Slice& slice);
  // What the rule needs; adds what is new to `made`. Returns whether all states
  // were there.
  bool prepare_state(
      Slice& slice,
      const RuleSpec& rule,
      std::vector<at::Tensor*>& made);

  // As in Comm.
  KeyState state_of(Entry& entry, const RuleSpec& rule);
  void set_state(Entry& entry, const RuleSpec& rule, const KeyState& state);
  void clear_state(Entry& entry);

  // A new whole tensor like the stored value, of any dtype.
  at::Tensor empty_like(
      const Entry& entry,
      c10::ScalarType dtype,
      c10::Device device);
  // A copy of the stored value, ordered with the current stream of `device`.
  at::Tensor copy_of(Entry& entry, c10::Device device);

  // Copies tensors of one shape; one of them may be a slice's. REQUIRES: as
  // merge_buffer, or both are in CPU memory.
  void copy(const at::Tensor& destination, const at::Tensor& source);

 private:
  at::Tensor allocate_like(const at::Tensor& model, c10::ScalarType dtype);
  Slice make_slice(
      const Entry& entry,
      const Place& home,
      int64_t begin,
      int64_t end,
      StreamOrder& order);
  void replace(Entry& entry, c10::SmallVector<Slice, 1> slices);
  Place least_loaded(c10::ArrayRef<Place> places);
  void place_whole(c10::SmallVectorImpl<const Item*>& items);
  void cut(c10::ArrayRef<const Item*> items, c10::ArrayRef<Place> places);
  void move(
      Entry& entry,
      c10::ArrayRef<Place> places,
      c10::ArrayRef<Piece> pieces);
  void copy_part(Slice& from, Slice& to, StreamOrder& order);
  at::Tensor gathered(
      Entry& entry,
      c10::function_ref<const at::Tensor&(const Slice&)> member,
      c10::Device device);
  at::Tensor lying_as(const Entry& entry, const at::Tensor& tensor);
  using Load = std::atomic<int64_t>; // bytes of values
  std::shared_ptr<Load> load_of(const Place& place);
  void take_account(const Entry& entry, Slice& slice);

  const Policy policy_;
  Runtime& runtime_;
  EventPool& events_;
  Places& places_;
  std::mutex loads_mutex_; // guards loads_
  std::vector<std::pair<Place, std::shared_ptr<Load>>> loads_;
};

} // namespace torchkv
