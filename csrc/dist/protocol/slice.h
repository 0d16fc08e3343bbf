#pragma once

#include <c10/util/ArrayRef.h>

#include <cstddef>
#include <cstdint>
#include <functional>
#include <limits>
#include <string>
#include <vector>

#include "../../core/export.h"
#include "../../core/key.h"
#include "../../core/mixed_bits.h"
#include "../../core/row_init.h"
#include "rare.h"

namespace torchkv::dist {

// The part of a key that one server holds. A key that is not split has one.
struct SliceId {
  Key key = 0;
  int32_t index = kServer;

  // An operation on the server itself, not on a key.
  static constexpr int32_t kServer = -1;
  bool is_server() const {
    return index == kServer;
  }
  // Several slices: see SliceList.
  static constexpr int32_t kList = -2;
  bool is_list() const {
    return index == kList;
  }
  // "w/0" or "3/0"
  TORCHKV_API std::string text() const;

  friend bool operator==(const SliceId& a, const SliceId& b) {
    return a.index == b.index && a.key == b.key;
  }
  friend bool operator!=(const SliceId& a, const SliceId& b) {
    return !(a == b);
  }
};
// int keys before str keys.
TORCHKV_API bool operator<(const SliceId& a, const SliceId& b);

struct SliceHash {
  size_t operator()(const SliceId& slice) const {
    return KeyHash()(slice.key) * 31 + static_cast<size_t>(slice.index);
  }
};

// What ranks must agree on about a key, fixed by its init.
struct KeySpec {
  int64_t total = 0; // elements of the whole key; 0 of a row-sparse one
  int32_t dtype = 0; // c10::ScalarType
  int32_t item_bytes = 4; // of an element
  bool whole = false; // one slice whatever the size
  std::vector<int64_t> sizes;
  // Of a row-sparse key, whose first size is the number of rows that it may
  // have: what rows begin with. Rank 0's counts.
  Rare<RowInit> row_init;

  bool is_row_sparse() const {
    return row_init.has_value();
  }
  friend bool operator==(const KeySpec& a, const KeySpec& b) {
    return a.total == b.total && a.dtype == b.dtype &&
        a.item_bytes == b.item_bytes && a.whole == b.whole &&
        a.sizes == b.sizes && a.is_row_sparse() == b.is_row_sparse();
  }
};

// 64-bit FNV-1a of the key's text, or of its 8 bytes, little endian.
TORCHKV_API uint64_t stable_hash(const Key& key);

// A slice's place: elements [begin, end) of the key, on a server.
struct Place {
  int32_t server;
  int32_t index;
  int64_t begin;
  int64_t end;
};

// Where a key's slices are: a pure function, so that ranks need not agree
// first. A key of `split_bytes` or more that is not whole is split evenly over
// all servers. The first slice is on server hash mod S whatever the size: there
// ranks that disagree about it meet. Slices begin at rows, along the first
// dimension, where they have 32 or more of them, and at multiples of 16
// elements where they have as many. Of a row-sparse key, each server has one
// slice, without elements: its rows are those of slice_of_row.
TORCHKV_API std::vector<Place> place(
    const Key& key,
    const KeySpec& spec,
    int32_t num_servers,
    int64_t split_bytes);

// Which slice of a row-sparse key has a row: ids of any pattern are spread.
inline size_t slice_of_row(int64_t id, size_t num_slices) {
  return mixed_bits(static_cast<uint64_t>(id)) % num_slices;
}

// Elements of a row, along the first dimension.
TORCHKV_API int64_t row_size(const KeySpec& spec);
// The most elements by which rows and slices are both divided: those of a row,
// where slices begin at rows. REQUIRES: the key's places.
TORCHKV_API int64_t cell_size(const KeySpec& spec, c10::ArrayRef<Place> places);

// More than the encoded payload of a push takes: packed codes
// (kernels/cpu/packed_codes.h), or ids and rows, of which a slice may get as
// many as the key has. Of a row-sparse key, as many as are sent.
inline int64_t max_encoded_bytes(const KeySpec& spec) {
  return spec.is_row_sparse() ? std::numeric_limits<int64_t>::max()
                              : 128 + 24 * spec.total;
}

} // namespace torchkv::dist
