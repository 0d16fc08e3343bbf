#pragma once

#include <ATen/core/Tensor.h>
#include <c10/util/ArrayRef.h>
#include <c10/util/SmallVector.h>

#include <cstdint>
#include <initializer_list>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "../core/export.h"
#include "../core/key.h"
#include "../core/value.h"

namespace torchkv {

// The keys of a call, in the order given, repeats included.
struct TORCHKV_API Keys {
  Keys() = default;
  // Implicit on purpose: C++ programs write `store.push(3, x)` and
  // `store.push({5, 7}, ...)`.
  template <
      class T,
      class = std::enable_if_t<std::is_constructible_v<Key, T&&>>>
  Keys(T&& key) // NOLINT(google-explicit-constructor)
      : list{Key(std::forward<T>(key))} {}
  Keys(std::initializer_list<Key> keys)
      : list(keys.begin(), keys.end()), single(false) {}

  int64_t size() const {
    return static_cast<int64_t>(list.size());
  }
  // "(key 3)" or "(keys 5, 7, 9)": the end of a message about them all.
  std::string context() const;

  c10::SmallVector<Key, 1> list;
  bool single = true; // one key by itself, not a list of one
};

// The tensors of a call, one group per key, all in one flat list.
struct TORCHKV_API Tensors {
  Tensors() = default;
  // One tensor for one key.
  Tensors(const at::Tensor& tensor) // NOLINT(google-explicit-constructor)
      : flat{tensor}, ends{1} {}
  // A group per key.
  Tensors(std::vector<std::vector<at::Tensor>> groups);
  // The replicas of one key.
  static Tensors replicas(at::TensorList tensors);
  // One tensor for each key.
  static Tensors one_each(at::TensorList tensors);
  // One encoded value for one key.
  static Tensors encoded(
      const at::Tensor& payload,
      std::shared_ptr<const Encoding> encoding);

  int64_t size() const {
    return static_cast<int64_t>(ends.size());
  }
  // Where group i begins in `flat`.
  int64_t begin(int64_t i) const {
    return i == 0 ? 0 : ends[i - 1];
  }
  c10::ArrayRef<at::Tensor> of(int64_t i) const {
    return c10::ArrayRef<at::Tensor>(flat).slice(begin(i), ends[i] - begin(i));
  }
  // By index in `flat`.
  Value value(int64_t index) const {
    return {
        &flat[index],
        encodings.empty() ? nullptr
                          : encodings[static_cast<size_t>(index)].get()};
  }
  // Whether each group has one tensor. REQUIRES: none is empty.
  bool has_one_each() const {
    return flat.size() == ends.size();
  }
  // The elements of a value or, with an encoding, its payload.
  void append(
      const at::Tensor& tensor,
      std::shared_ptr<const Encoding> encoding = nullptr) {
    if (encoding != nullptr || !encodings.empty()) {
      encodings.resize(flat.size());
      encodings.push_back(std::move(encoding));
    }
    flat.push_back(tensor);
  }
  void end_group() {
    ends.push_back(static_cast<int64_t>(flat.size()));
  }

  c10::SmallVector<at::Tensor, 4> flat;
  c10::SmallVector<int64_t, 2> ends; // of group i in `flat`
  // As long as `flat`, with null for dense tensors; empty where all are dense.
  std::vector<std::shared_ptr<const Encoding>> encodings;
};

// Options of init, push, pull, pushpull and broadcast.
struct CallOptions {
  // Larger priorities go first among queued operations; a store on one machine
  // queues none.
  int64_t priority = 0;
  // Return a Work (device/work.h) once arguments are checked and work is
  // enqueued.
  bool async_op = false;
  // init, broadcast: one server of a store on several machines holds the whole
  // value whatever its size, as opaque updaters and LAMB require.
  bool whole = false;
  // init, assign: the stored value is the caller's tensor itself from now on.
  bool share = false;
  // pull: wait until the value has had so many updates; on one machine,
  // ValueError if it has not.
  int64_t min_version = 0;
  // pull: skip sparse outs; else they get the rows that the value has, of a
  // dense value all rows.
  bool ignore_sparse = true;
};

// A call that moves values into a store or out of it. It owns nothing.
struct Call {
  const char* op; // in messages
  const Keys& keys;
  const Tensors* values = nullptr; // null: writes nothing into the store
  const Tensors* outs = nullptr; // null: reads nothing from it
  CallOptions options = {};
};

} // namespace torchkv
