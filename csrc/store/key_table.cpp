#include "key_table.h"

#include <algorithm>
#include <mutex>

#include "../core/errors.h"

namespace torchkv {
namespace {

void expect_kind(const char* op, KeyKind kind, const Key& key) {
  TORCH_CHECK_TYPE(
      key.kind() == kind,
      op,
      ": expected ",
      name(kind),
      " keys, the kind of this store, but got a key of kind ",
      name(key.kind()),
      " ",
      key.context());
}

void expect_new(const char* op, bool is_new, const Key& key) {
  TORCH_CHECK_VALUE(
      is_new,
      op,
      ": expected a new key, but got one already initialised ",
      key.context());
}

} // namespace

void KeyTable::check_still_open(const char* op) const {
  TORCH_CHECK(!closed_, op, ": expected an open store, but got a closed one");
}

void KeyTable::check_open(const char* op) const {
  const std::shared_lock lock(mutex_);
  check_still_open(op);
}

void KeyTable::check_kind(const char* op, const Key& key) const {
  if (kind_) {
    expect_kind(op, *kind_, key);
  }
}

const EntryPtr& KeyTable::find_one(const char* op, const Key& key) const {
  const auto it = entries_.find(key);
  if (it == entries_.end()) {
    check_kind(op, key);
    throw_unknown_key(op, key);
  }
  return it->second;
}

void KeyTable::insert(const char* op, const Entries& entries) {
  const std::unique_lock lock(mutex_);
  check_still_open(op);
  const KeyKind kind = kind_.value_or(entries[0]->key.kind());
  size_t num_inserted = 0;
  const auto undo = [&] {
    for (size_t i = 0; i < num_inserted; ++i) {
      entries_.erase(entries[i]->key);
    }
  };
  try {
    for (const auto& entry : entries) {
      expect_kind(op, kind, entry->key);
      expect_new(op, entries_.emplace(entry->key, entry).second, entry->key);
      entry->ordinal = num_inserted_ + static_cast<int64_t>(num_inserted);
      ++num_inserted;
    }
  } catch (...) {
    undo();
    throw;
  }
  num_inserted_ += static_cast<int64_t>(num_inserted);
  kind_ = kind;
}

void KeyTable::check_absent(const char* op, const Keys& keys) const {
  const std::shared_lock lock(mutex_);
  check_still_open(op);
  for (const auto& key : keys.list) {
    check_kind(op, key);
    expect_new(op, entries_.find(key) == entries_.end(), key);
  }
}

Entries KeyTable::find(const char* op, const Keys& keys) const {
  Entries result;
  result.reserve(keys.list.size());
  const std::shared_lock lock(mutex_);
  check_still_open(op);
  for (const auto& key : keys.list) {
    result.push_back(find_one(op, key));
  }
  return result;
}

void KeyTable::erase(const char* op, const Keys& keys) {
  Entries unlinked; // freed after the lock is released
  const std::unique_lock lock(mutex_);
  check_still_open(op);
  for (const auto& key : keys.list) {
    unlinked.push_back(find_one(op, key));
  }
  for (const auto& key : keys.list) {
    entries_.erase(key);
  }
}

bool KeyTable::contains(const char* op, const Key& key) const {
  const std::shared_lock lock(mutex_);
  check_still_open(op);
  check_kind(op, key);
  return entries_.find(key) != entries_.end();
}

int64_t KeyTable::size(const char* op) const {
  const std::shared_lock lock(mutex_);
  check_still_open(op);
  return static_cast<int64_t>(entries_.size());
}

std::vector<EntryPtr> KeyTable::sorted_entries() const {
  std::vector<EntryPtr> result;
  result.reserve(entries_.size());
  for (const auto& [key, entry] : entries_) {
    result.push_back(entry);
  }
  std::sort(result.begin(), result.end(), [](const auto& a, const auto& b) {
    return a->ordinal < b->ordinal;
  });
  return result;
}

std::vector<EntryPtr> KeyTable::entries(const char* op) const {
  const std::shared_lock lock(mutex_);
  check_still_open(op);
  return sorted_entries();
}

std::optional<std::vector<EntryPtr>> KeyTable::entries_if_open() const {
  const std::shared_lock lock(mutex_);
  if (closed_) {
    return std::nullopt;
  }
  return sorted_entries();
}

std::vector<EntryPtr> KeyTable::take(const char* op, KeyTable& other) {
  const std::scoped_lock lock(mutex_, other.mutex_);
  check_still_open(op);
  TORCH_CHECK_TYPE(
      !kind_ || !other.kind_ || *kind_ == *other.kind_,
      op,
      ": expected ",
      name(*kind_),
      " keys, the kind of this store, but got keys of kind ",
      name(*other.kind_));
  auto replaced = sorted_entries();
  entries_.clear();
  entries_.swap(other.entries_);
  kind_ = kind_ ? kind_ : other.kind_;
  num_inserted_ = other.num_inserted_;
  return replaced;
}

void KeyTable::fix_kind(KeyKind kind) {
  const std::unique_lock lock(mutex_);
  TORCHKV_INTERNAL_ASSERT(!kind_ || *kind_ == kind);
  kind_ = kind;
}

std::optional<KeyKind> KeyTable::kind() const {
  const std::shared_lock lock(mutex_);
  return kind_;
}

std::vector<EntryPtr> KeyTable::close() {
  const std::unique_lock lock(mutex_);
  closed_ = true;
  auto unlinked = sorted_entries();
  entries_.clear();
  return unlinked;
}

} // namespace torchkv
