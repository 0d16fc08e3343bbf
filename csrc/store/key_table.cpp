#include "key_table.h"

#include <algorithm>
#include <mutex>
#include <utility>

#include "../core/errors.h"

namespace torchkv {
namespace {

void expect_kind(const char* op, KeyKind kind, const Key& key) {
  const Where where{op, key};
  TORCHKV_CHECK_TYPE(
      key.kind() == kind,
      where,
      "expected ",
      name(kind),
      " keys, the kind of this store, but got a key of kind ",
      name(key.kind()));
}

void expect_same_kind(
    const char* op,
    std::optional<KeyKind> own,
    std::optional<KeyKind> other) {
  TORCH_CHECK_TYPE(
      !own || !other || own == other,
      op,
      ": expected ",
      name(*own),
      " keys, the kind of this store, but got keys of kind ",
      name(*other));
}

void expect_new(const char* op, bool is_new, const Key& key) {
  const Where where{op, key};
  TORCHKV_CHECK_VALUE(
      is_new, where, "expected a new key, but got one already initialised");
}

} // namespace

void expect_open(const char* op, bool is_open) {
  TORCH_CHECK(is_open, op, ": expected an open store, but got a closed one");
}

void KeyTable::check_open(const char* op) const {
  expect_open(op, summary().is_open);
}

void KeyTable::check_kind(const char* op, const Key& key) const {
  expect_kind(op, summary_.kind.value_or(key.kind()), key);
}

const EntryPtr& KeyTable::known(const char* op, const Key& key) const {
  const auto it = entries_.find(key);
  if (it == entries_.end()) {
    check_kind(op, key);
    throw_unknown_key(op, key);
  }
  return it->second;
}

void KeyTable::insert(const char* op, const Entries& entries) {
  const std::unique_lock lock(mutex_);
  expect_open(op, summary_.is_open);
  const KeyKind kind = summary_.kind.value_or(entries[0]->key.kind());
  size_t num_inserted = 0;
  int64_t num_bytes = 0;
  try {
    for (const auto& entry : entries) {
      expect_kind(op, kind, entry->key);
      expect_new(op, entries_.emplace(entry->key, entry).second, entry->key);
      entry->ordinal = num_inserted_ + static_cast<int64_t>(num_inserted);
      ++num_inserted;
      num_bytes += entry->meta.num_bytes();
    }
  } catch (...) {
    for (size_t i = 0; i < num_inserted; ++i) {
      entries_.erase(entries[i]->key);
    }
    throw;
  }
  num_inserted_ += static_cast<int64_t>(num_inserted);
  summary_.num_bytes += num_bytes;
  summary_.kind = kind;
}

void KeyTable::check_absent(const char* op, const Keys& keys) const {
  const std::shared_lock lock(mutex_);
  expect_open(op, summary_.is_open);
  for (const auto& key : keys.list) {
    check_kind(op, key);
    expect_new(op, entries_.count(key) == 0, key);
  }
}

KeyTable::Reservation::Reservation(
    KeyTable& table,
    const char* op,
    const Keys& keys)
    : table_(table) {
  const std::unique_lock lock(table_.mutex_);
  expect_open(op, table_.summary_.is_open);
  auto& reserved = table_.reserved_;
  const KeyKind kind = table_.summary_.kind.value_or(
      (reserved.empty() ? keys.list[0] : *reserved.begin()).kind());
  for (const auto& key : keys.list) {
    expect_kind(op, kind, key);
    expect_new(
        op, table_.entries_.count(key) == 0 && reserved.count(key) == 0, key);
  }
  reserved.insert(keys.list.begin(), keys.list.end());
  keys_ = keys;
}

KeyTable::Reservation::~Reservation() {
  const std::unique_lock lock(table_.mutex_);
  for (const auto& key : keys_.list) {
    table_.reserved_.erase(key);
  }
}

Entries KeyTable::find(const char* op, const Keys& keys) const {
  Entries result;
  result.reserve(keys.list.size());
  const std::shared_lock lock(mutex_);
  expect_open(op, summary_.is_open);
  for (const auto& key : keys.list) {
    result.push_back(known(op, key));
  }
  return result;
}

std::vector<KeyStats> KeyTable::stats(const char* op, const Keys& keys) const {
  std::vector<KeyStats> result;
  result.reserve(keys.list.size());
  for (const auto& entry : find(op, keys)) {
    const std::lock_guard lock(entry->mutex);
    result.push_back(entry->stats);
  }
  return result;
}

void KeyTable::erase(const char* op, const Keys& keys) {
  Entries unlinked; // freed after the lock is released
  const std::unique_lock lock(mutex_);
  expect_open(op, summary_.is_open);
  for (const auto& key : keys.list) {
    unlinked.push_back(known(op, key));
  }
  for (const auto& entry : unlinked) {
    if (entries_.erase(entry->key) != 0) {
      summary_.num_bytes -= entry->meta.num_bytes();
    }
  }
}

EntryPtr KeyTable::find_one(const char* op, const Key& key) const {
  const std::shared_lock lock(mutex_);
  expect_open(op, summary_.is_open);
  check_kind(op, key);
  const auto it = entries_.find(key);
  return it == entries_.end() ? EntryPtr() : it->second;
}

KeyTable::Summary KeyTable::summary() const {
  const std::shared_lock lock(mutex_);
  Summary result = summary_;
  result.num_keys = static_cast<int64_t>(entries_.size());
  return result;
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
  expect_open(op, summary_.is_open);
  return sorted_entries();
}

std::vector<Key> KeyTable::keys(const char* op) const {
  std::vector<Key> result;
  for (const auto& entry : entries(op)) {
    result.push_back(entry->key);
  }
  return result;
}

std::optional<Meta> KeyTable::meta(const char* op, const Key& key) const {
  const EntryPtr entry = find_one(op, key);
  return entry == nullptr ? std::nullopt : std::optional(entry->meta);
}

std::vector<EntryPtr> KeyTable::take(const char* op, KeyTable& other) {
  const std::scoped_lock lock(mutex_, other.mutex_);
  expect_open(op, summary_.is_open);
  expect_same_kind(op, summary_.kind, other.summary_.kind);
  auto replaced = sorted_entries();
  entries_.clear();
  entries_.swap(other.entries_);
  summary_.num_bytes = std::exchange(other.summary_.num_bytes, 0);
  if (!summary_.kind) {
    summary_.kind = other.summary_.kind;
  }
  num_inserted_ = other.num_inserted_;
  return replaced;
}

void KeyTable::check_same_kind(const char* op, std::optional<KeyKind> kind)
    const {
  expect_same_kind(op, summary().kind, kind);
}

void KeyTable::fix_kind(KeyKind kind) {
  const std::unique_lock lock(mutex_);
  TORCHKV_INTERNAL_ASSERT(summary_.kind.value_or(kind) == kind);
  summary_.kind = kind;
}

std::vector<EntryPtr> KeyTable::close() {
  const std::unique_lock lock(mutex_);
  summary_.is_open = false;
  summary_.num_bytes = 0;
  auto unlinked = sorted_entries();
  entries_.clear();
  return unlinked;
}

} // namespace torchkv
