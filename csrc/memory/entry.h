#pragma once

#include <ATen/core/Tensor.h>
#include <c10/macros/Macros.h>
#include <c10/util/SmallVector.h>
#include <c10/util/intrusive_ptr.h>

#include <algorithm>
#include <array>
#include <cstdint>
#include <memory>
#include <mutex>
#include <utility>
#include <vector>

#include "../core/key.h"
#include "../core/place.h"
#include "../core/rule.h"
#include "../device/stream_order.h"
#include "key_stats.h"
#include "meta.h"
#include "row_table.h"

namespace torchkv {

// A shard of a stored value on one place. A value that is not sharded has one
// slice, with the value's shape; slices of a sharded value are one-dimensional.
struct Slice {
  // Elements [begin, end), in the order of the value's memory.
  int64_t begin = 0;
  int64_t end = 0;
  Place home;
  at::Tensor value;
  at::Tensor merge_buffer; // the sum of a push, for an opaque updater
  // For an optimizer, all with the memory layout of `value`, in fp32 or, for
  // fp64 values, fp64 (or complex numbers of these); undefined where not
  // needed.
  at::Tensor master; // the value, if its dtype rounds it
  std::array<at::Tensor, kMaxStates> states;
  at::Tensor accumulated; // the sum of the pushes since the last step
  bool is_leased = false; // `value` may have been handed out (Slices::lease)
  Timeline timeline; // orders the streams that touch the tensors above
  // RAII token: subtracts this slice's bytes from its device's load.
  std::shared_ptr<void> load;

  // Later work on the home may use the tensors.
  void enter(StreamOrder& order) {
    if (order.enter(home, timeline)) {
      keep(order, home);
    }
  }
  // The same for work on another place, an accelerator unless the slice is in
  // CPU memory.
  void enter(StreamOrder& order, const Place& place) {
    if (home.device.is_cpu()) {
      order.enter(place);
    } else if (order.enter(place, timeline)) {
      keep(order, place);
    }
  }

 private:
  C10_NOINLINE void keep(StreamOrder& order, const Place& place) const {
    const c10::Stream stream = order.stream(place);
    const auto keep = [&](const at::Tensor& tensor) {
      if (tensor.defined()) {
        order.runtime().keep_until_done(tensor, stream);
      }
    };
    for (const auto* tensor : {&value, &merge_buffer, &master, &accumulated}) {
      keep(*tensor);
    }
    std::for_each(states.begin(), states.end(), keep);
  }
};

// What compression has not sent yet of the values at one position of a list.
struct Residual {
  at::Tensor tensor; // the whole value's layout, on the latest value's device
  Timeline timeline; // orders the streams that touch it
};

// Where calls with tensors on several devices have placed a value.
enum class Placing : uint8_t {
  kNot, // none yet: where it began, or on the accelerator of a call of one
        // device
  kWhole, // on one of the devices, for an updater that needs the whole value
  kSharded, // over the devices, or whole because it is small
};

// One key of the store. `delete` unlinks it from the table; calls in flight
// keep it alive.
//
// Invariants:
// 1. No tensor of `slices` aliases a tensor of the caller, except a shared
//    value and those passed to a running updater.
// 2. The slices are ordered, disjoint and cover the value. There is at least
//    one. A row-sparse value has one, of the rows that it has.
struct Entry : c10::intrusive_ptr_target {
  Entry(Key key_, Meta meta_) : key(std::move(key_)), meta(std::move(meta_)) {}

  const Key key;
  const Meta meta;
  int64_t ordinal = 0; // order of init; set once by the key table

  // Guards everything below. Acquired with the GIL released, as for_each_locked
  // does, and before an updater's mutex.
  std::mutex mutex;
  c10::SmallVector<Slice, 1> slices;
  // Of a row-sparse value; null: dense. Never changes; guarded is what it
  // points to.
  std::unique_ptr<RowTable> rows;
  c10::SmallVector<int64_t, 4> strides; // of the whole value, which is dense
  c10::Device device = c10::kCPU; // of new tensors like it
  // Where it is part of a larger value: how many of that value's elements
  // precede it, for its random numbers.
  int64_t offset = 0;
  Placing placing = Placing::kNot;
  // The value is a tensor of the caller's, in the only slice, which stays where
  // it is. The caller may write it between calls.
  bool is_shared = false;
  // The masters were loaded since the last step, perhaps those of another
  // value.
  bool is_master_loaded = false;
  int64_t version = 0; // number of updates since init
  // Generation of the optimizer whose state the slices hold; 0 = none.
  uint64_t generation = 0;
  int64_t step = 0; // steps of that optimizer
  int64_t num_accumulated = 0; // pushes in `accumulated`
  std::vector<Residual> residuals; // by position
  uint64_t residual_generation = 0; // of the latest compression that made them
  int64_t num_compressed = 0; // pushes whose values were compressed
  KeyStats stats;
};

using EntryPtr = c10::intrusive_ptr<Entry>;
// The entries of a call's keys.
using Entries = c10::SmallVector<EntryPtr, 2>;

} // namespace torchkv
