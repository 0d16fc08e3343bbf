#pragma once

#include <c10/macros/Macros.h>
#include <c10/util/flat_hash_map.h>

#include <cstdint>
#include <optional>
#include <shared_mutex>
#include <unordered_set>
#include <vector>

#include "../core/export.h"
#include "../core/key.h"
#include "../memory/entry.h"
#include "arguments.h"

namespace torchkv {

// RuntimeError unless the store is open.
void expect_open(const char* op, bool is_open);

// The keys of one store. Any thread may call any method; none blocks for longer
// than it takes to look the keys up. REQUIRES for all: the GIL is released.
//
// Invariants:
// 1. All keys are of one kind, which the first insert fixes.
// 2. A method that throws has changed nothing.
// 3. After close() all methods that take an operation throw RuntimeError.
class TORCHKV_API KeyTable {
 public:
  // Adds all entries or none: ValueError for a key that exists or is repeated,
  // TypeError for one of the other kind.
  void insert(const char* op, const Entries& entries);

  // The same checks without the insert, to fail before values are copied.
  // Another thread may still insert in between.
  void check_absent(const char* op, const Keys& keys) const;

  // Makes the same checks, and those of other reservations fail for as long as
  // it exists, for an init that takes long.
  class TORCHKV_API Reservation {
   public:
    Reservation(KeyTable& table, const char* op, const Keys& keys);
    ~Reservation();
    C10_DISABLE_COPY_AND_ASSIGN(Reservation);

   private:
    KeyTable& table_;
    Keys keys_;
  };

  // The entries of `keys`, in order. UnknownKeyError for an unknown key,
  // TypeError for one of the other kind.
  Entries find(const char* op, const Keys& keys) const;
  // REQUIRES: the thread holds no entry's mutex.
  std::vector<KeyStats> stats(const char* op, const Keys& keys) const;

  // Unlinks all keys or, if one is unknown, none.
  void erase(const char* op, const Keys& keys);

  // As find, but null for an unknown key.
  EntryPtr find_one(const char* op, const Key& key) const;

  void check_open(const char* op) const;

  // Every entry, in order of insertion.
  std::vector<EntryPtr> entries(const char* op) const;

  // Their keys.
  std::vector<Key> keys(const char* op) const;
  // As find_one: of the entry.
  std::optional<Meta> meta(const char* op, const Key& key) const;

  // Replaces all entries by those of `other`, which is left empty, and returns
  // them for the caller to free. TypeError where the kinds of keys differ.
  // REQUIRES: no other thread uses `other`.
  std::vector<EntryPtr> take(const char* op, KeyTable& other);

  // TypeError if both the table and `kind` have a kind of keys, and not one.
  void check_same_kind(const char* op, std::optional<KeyKind> kind) const;

  // As the first insert does. REQUIRES: no key of the other kind was inserted.
  void fix_kind(KeyKind kind);

  struct Summary {
    bool is_open = true;
    int64_t num_keys = 0;
    int64_t num_bytes = 0; // of the values
    std::optional<KeyKind> kind; // unset until the first insert
  };
  Summary summary() const;

  // Removes all entries and returns them, for the caller to free. Calls in
  // flight finish on the entries they hold.
  std::vector<EntryPtr> close();

 private:
  // These need the lock.
  void check_kind(const char* op, const Key& key) const;
  const EntryPtr& known(const char* op, const Key& key) const;
  std::vector<EntryPtr> sorted_entries() const;

  mutable std::shared_mutex mutex_; // guards everything below
  ska::flat_hash_map<Key, EntryPtr, KeyHash> entries_;
  std::unordered_set<Key, KeyHash> reserved_; // of one kind
  Summary summary_; // without num_keys
  int64_t num_inserted_ = 0;
};

} // namespace torchkv
