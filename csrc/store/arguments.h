#pragma once

#include <ATen/core/Tensor.h>
#include <c10/util/ArrayRef.h>
#include <c10/util/SmallVector.h>

#include <cstdint>
#include <initializer_list>
#include <optional>
#include <string>
#include <vector>

#include "../core/export.h"
#include "../core/key.h"
#include "../memory/entry.h"

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

  int64_t size() const {
    return static_cast<int64_t>(ends.size());
  }
  c10::ArrayRef<at::Tensor> of(int64_t i) const {
    const int64_t begin = i == 0 ? 0 : ends[i - 1];
    return c10::ArrayRef<at::Tensor>(flat).slice(begin, ends[i] - begin);
  }
  void append(const at::Tensor& tensor) {
    flat.push_back(tensor);
  }
  void end_group() {
    ends.push_back(static_cast<int64_t>(flat.size()));
  }

  c10::SmallVector<at::Tensor, 4> flat;
  c10::SmallVector<int64_t, 2> ends; // of group i in `flat`
};

using Entries = c10::SmallVector<EntryPtr, 2>;

// Makes one group of the groups that name one entry: `entries` keeps each entry
// once, where it first appears, and its group holds the tensors of all its
// appearances in the order given. Nothing where no entry repeats.
// REQUIRES: entries.size() == tensors.size()
TORCHKV_API std::optional<Tensors> merge_repeats(
    Entries& entries,
    const Tensors& tensors);

} // namespace torchkv
