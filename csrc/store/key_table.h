#pragma once

#include <c10/util/ArrayRef.h>
#include <c10/util/flat_hash_map.h>

#include <cstdint>
#include <optional>
#include <shared_mutex>
#include <vector>

#include "../core/export.h"
#include "../core/key.h"
#include "entries.h"

namespace torchkv {

// The keys of one store. Any thread may call any method; none blocks for longer
// than it takes to look the keys up. REQUIRES for all: the GIL is released.
//
// Invariants:
// 1. All keys are of one kind, which the first insert fixes.
// 2. A method that throws has changed nothing.
// 3. After close() every other method throws RuntimeError.
class TORCHKV_API KeyTable {
 public:
  // Adds all entries or none: ValueError for a key that exists or is repeated,
  // TypeError for one of the other kind.
  void insert(const char* op, const Entries& entries);

  // The same checks without the insert, to fail before values are copied.
  // Another thread may still insert in between.
  void check_absent(const char* op, const Keys& keys) const;

  // The entries of `keys`, in order. UnknownKeyError for an unknown key,
  // TypeError for one of the other kind.
  Entries find(const char* op, const Keys& keys) const;

  // Unlinks all keys or, if one is unknown, none.
  void erase(const char* op, const Keys& keys);

  bool contains(const char* op, const Key& key) const;
  int64_t size(const char* op) const;

  void check_open(const char* op) const;

  // Every entry, in order of insertion.
  std::vector<EntryPtr> entries(const char* op) const;

  // Replaces all entries by those of `other`, which is left empty, and returns
  // them for the caller to free. TypeError where the kinds of keys differ.
  // REQUIRES: no other thread uses `other`.
  std::vector<EntryPtr> take(const char* op, KeyTable& other);

  // As the first insert does. REQUIRES: no key of the other kind was inserted.
  void fix_kind(KeyKind kind);
  // Unset until the first insert. May be called after close().
  std::optional<KeyKind> kind() const;
  // As entries(), but an empty optional after close() instead of a throw.
  std::optional<std::vector<EntryPtr>> entries_if_open() const;

  // Removes all entries and returns them, for the caller to free. Calls in
  // flight finish on the entries they hold.
  std::vector<EntryPtr> close();

 private:
  void check_still_open(const char* op) const;
  void check_kind(const char* op, const Key& key) const;
  const EntryPtr& find_one(const char* op, const Key& key) const;
  std::vector<EntryPtr> sorted_entries() const;

  mutable std::shared_mutex mutex_; // guards everything below
  ska::flat_hash_map<Key, EntryPtr, KeyHash> entries_;
  std::optional<KeyKind> kind_;
  int64_t num_inserted_ = 0;
  bool closed_ = false;
};

} // namespace torchkv
