#pragma once

#include <ATen/core/Tensor.h>
#include <c10/util/SmallVector.h>
#include <c10/util/intrusive_ptr.h>

#include <array>
#include <cstdint>
#include <memory>
#include <mutex>
#include <utility>

#include "../core/key.h"
#include "../core/place.h"
#include "../core/rule.h"
#include "../device/runtime.h"

namespace torchkv {

// What a call is checked against. It never changes, so checks need no lock.
struct Meta {
  c10::SmallVector<int64_t, 4> sizes;
  c10::ScalarType dtype = c10::kFloat;
  int64_t num_elements = 0;
};

// A part of a stored value that lives in one place. One slice that holds the
// whole value is the plain case: its tensors have the value's shape. A value
// that is cut has several, of one dimension each.
struct Slice {
  int64_t begin = 0; // elements, counted as the value lies in memory: [begin,
  int64_t end = 0; // end)
  Place home;
  at::Tensor value;
  at::Tensor merge_buffer; // the sum of a push, for an opaque updater
  // For an optimizer, all in the places of the value's elements, in fp32 or,
  // for fp64 values, fp64 (or complex numbers of these); undefined where not
  // needed.
  at::Tensor master; // the value itself, where its dtype rounds it
  std::array<at::Tensor, kMaxStates> states;
  at::Tensor accumulated; // the sum of the pushes since the last step
  Timeline timeline; // orders the streams that touch the tensors above
  std::shared_ptr<void>
      load; // what the home's account has of it; gives it back
};

// How far calls of several devices have decided where a value lives.
enum class Placing : uint8_t {
  kNot, // where it began, or on the accelerator of a call of one device
  kWhole, // on one of the devices, for an updater that needs the whole value
  kCut, // cut over the devices, or whole because it is small
};

// One key of the store. `delete` unlinks it from the table; calls under way
// keep it alive.
//
// Invariants:
// 1. No tensor of `slices` aliases a tensor of the caller, except what an
//    updater is handed while it runs.
// 2. The slices are ordered, disjoint and cover the value. There is at least
//    one.
struct Entry : c10::intrusive_ptr_target {
  Entry(Key key_, Meta meta_) : key(std::move(key_)), meta(std::move(meta_)) {}

  const Key key;
  const Meta meta;
  int64_t ordinal = 0; // order of init; set once by the key table

  // Guards everything below. Taken with the GIL released, one at a time by each
  // call, and before an updater's mutex.
  std::mutex mutex;
  c10::SmallVector<Slice, 1> slices;
  c10::SmallVector<int64_t, 4> strides; // of the whole value, which is dense
  c10::Device device = c10::kCPU; // of new tensors like it
  Placing placing = Placing::kNot;
  int64_t version = 0; // number of updates since init
  // Of the optimizer whose state the slices hold; 0 = none.
  uint64_t optimizer = 0;
  int64_t step = 0; // steps of that optimizer
  int64_t num_accumulated = 0; // pushes in `accumulated`
};

using EntryPtr = c10::intrusive_ptr<Entry>;

} // namespace torchkv
