// Whether a store has the keys that a call or a setter names.
#include <c10/util/Exception.h>

#include <string>
#include <utility>
#include <vector>

#include "../core/errors.h"
#include "../core/text.h"
#include "check.h"

namespace torchkv {
namespace {

std::string similar_key(const char* op, const Key& key, const KeyTable& table) {
  std::vector<std::string> names;
  for (const auto& entry : table.entries(op)) {
    if (entry->key.kind() == KeyKind::kStr) {
      names.push_back(entry->key.text());
    }
  }
  return key.kind() == KeyKind::kStr ? did_you_mean(key.text(), names)
                                     : std::string();
}

} // namespace

void check_known(
    const char* op,
    const KeyTable& table,
    c10::ArrayRef<Key> keys) {
  const auto kind = table.summary().kind;
  for (const auto& key : keys) {
    const Where where{op, key};
    TORCHKV_CHECK_TYPE(
        !kind || *kind == key.kind(),
        where,
        "expected options of ",
        name(*kind),
        " keys, the kind of this store, but got a key of kind ",
        name(key.kind()));
    if (table.find_one(op, key) == nullptr) {
      throw_unknown_option_key(op, key, similar_key(op, key, table));
    }
  }
}

std::vector<Key> check_or_expect(
    const char* op,
    const KeyTable& table,
    std::vector<Key> keys) {
  table.check_open(op);
  if (table.summary().num_keys != 0) {
    check_known(op, table, keys);
    keys.clear();
  }
  return keys;
}

std::vector<Key> unknown_option_keys(
    const char* op,
    const KeyTable& table,
    const Optimizer& optimizer,
    const Optimizer* known) {
  std::vector<Key> unknown;
  for (const auto& [key, options] : optimizer.keys) {
    if (known == nullptr || known->keys.count(key) == 0) {
      unknown.push_back(key);
    }
  }
  return check_or_expect(op, table, std::move(unknown));
}

} // namespace torchkv
