#pragma once

#include <cstddef>
#include <functional>
#include <iterator>
#include <list>
#include <tuple>
#include <unordered_map>
#include <utility>

namespace torchkv::dist {

// A hash map that iterates in order of insertion, so that what the cores do
// depends on their input only. Iterators stay valid until their element is
// erased.
template <class K, class V, class Hash = std::hash<K>>
class InsertionMap {
 public:
  using List = std::list<std::pair<const K, V>>;
  using iterator = typename List::iterator;
  using const_iterator = typename List::const_iterator;

  InsertionMap() = default;
  InsertionMap(const InsertionMap& other) : list_(other.list_) {
    for (auto at = list_.begin(); at != list_.end(); ++at) {
      index_.emplace(at->first, at);
    }
  }
  InsertionMap(InsertionMap&&) = default;
  InsertionMap& operator=(InsertionMap other) noexcept {
    list_.swap(other.list_);
    index_.swap(other.index_);
    return *this;
  }
  ~InsertionMap() = default;

  iterator begin() {
    return list_.begin();
  }
  iterator end() {
    return list_.end();
  }
  const_iterator begin() const {
    return list_.begin();
  }
  const_iterator end() const {
    return list_.end();
  }
  size_t size() const {
    return list_.size();
  }
  bool empty() const {
    return list_.empty();
  }
  bool contains(const K& key) const {
    return index_.find(key) != index_.end();
  }
  // Null if there is none.
  V* find(const K& key) {
    const auto found = index_.find(key);
    return found == index_.end() ? nullptr : &found->second->second;
  }
  const V* find(const K& key) const {
    const auto found = index_.find(key);
    return found == index_.end() ? nullptr : &found->second->second;
  }
  // A new value is made by its default constructor.
  V& operator[](const K& key) {
    if (V* value = find(key)) {
      return *value;
    }
    list_.emplace_back(
        std::piecewise_construct, std::forward_as_tuple(key), std::tuple<>());
    index_.emplace(key, std::prev(list_.end()));
    return list_.back().second;
  }
  bool erase(const K& key) {
    const auto found = index_.find(key);
    if (found == index_.end()) {
      return false;
    }
    list_.erase(found->second);
    index_.erase(found);
    return true;
  }
  iterator erase(iterator at) {
    index_.erase(at->first);
    return list_.erase(at);
  }
  void clear() {
    index_.clear();
    list_.clear();
  }

 private:
  List list_;
  std::unordered_map<K, iterator, Hash> index_;
};

} // namespace torchkv::dist
