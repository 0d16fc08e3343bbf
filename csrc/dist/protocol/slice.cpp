#include "slice.h"

#include <algorithm>
#include <functional>
#include <numeric>

namespace torchkv::dist {
namespace {

// Slices begin at multiples of this, a cache line of floats.
constexpr int64_t kSliceAlignment = 16;
// Of rows in a slice: by as much may slices be uneven that begin at rows.
constexpr int64_t kMinRows = 32;

// What slices of so many elements begin at multiples of.
int64_t slice_alignment(const KeySpec& spec, int64_t num_elements) {
  const int64_t row = row_size(spec);
  if (row > 1 && row <= num_elements / kMinRows) {
    const int64_t rows = kSliceAlignment / std::gcd(row, kSliceAlignment);
    const bool is_even = rows <= num_elements / kMinRows / row;
    return is_even ? rows * row : row;
  }
  return num_elements < kSliceAlignment ? 1 : kSliceAlignment;
}

class Fnv {
 public:
  void add(uint8_t byte) {
    hash_ = (hash_ ^ byte) * 1099511628211U;
  }
  uint64_t value() const {
    return hash_;
  }

 private:
  uint64_t hash_ = 14695981039346656037U;
};

} // namespace

std::string SliceId::text() const {
  if (is_server()) {
    return "";
  }
  std::string result =
      key.kind() == KeyKind::kInt ? std::to_string(key.id()) : key.text();
  result += '/';
  result += std::to_string(index);
  return result;
}

bool operator<(const SliceId& a, const SliceId& b) {
  if (a.key == b.key) {
    return a.index < b.index;
  }
  if (a.key.kind() != b.key.kind()) {
    return a.key.kind() == KeyKind::kInt;
  }
  return a.key.kind() == KeyKind::kInt ? a.key.id() < b.key.id()
                                       : a.key.text() < b.key.text();
}

uint64_t stable_hash(const Key& key) {
  Fnv fnv;
  if (key.kind() == KeyKind::kStr) {
    for (const char c : key.text()) {
      fnv.add(static_cast<uint8_t>(c));
    }
  } else {
    auto id = static_cast<uint64_t>(key.id());
    for (int i = 0; i < 8; ++i, id >>= 8U) {
      fnv.add(static_cast<uint8_t>(id & 0xFFU));
    }
  }
  return fnv.value();
}

std::vector<Place> place(
    const Key& key,
    const KeySpec& spec,
    int32_t num_servers,
    int64_t split_bytes) {
  // A quotient instead of a product, which could overflow.
  const int64_t item_bytes = std::max(spec.item_bytes, 1);
  const int64_t split = split_bytes <= 0
      ? 0
      : (split_bytes / item_bytes) + (split_bytes % item_bytes == 0 ? 0 : 1);
  int64_t parts = 1;
  if (!spec.whole && spec.is_row_sparse()) {
    parts = num_servers;
  } else if (!spec.whole && spec.total >= split) {
    parts = std::clamp<int64_t>(spec.total, 1, num_servers);
  }
  const auto home = static_cast<int64_t>(
      stable_hash(key) % static_cast<uint64_t>(num_servers));
  const int64_t cut = spec.total / parts;
  const int64_t rest = spec.total % parts;
  const int64_t alignment = slice_alignment(spec, cut);
  const auto begin = [&](int64_t i) {
    if (i == parts) {
      return spec.total;
    }
    if (cut < kSliceAlignment) {
      return i * cut;
    }
    const int64_t even = (i * cut) + (i * rest / parts);
    return even - (even % alignment);
  };
  std::vector<Place> places;
  places.reserve(static_cast<size_t>(parts));
  for (int64_t i = 0; i < parts; ++i) {
    places.push_back(
        {static_cast<int32_t>((home + i) % num_servers),
         static_cast<int32_t>(i),
         begin(i),
         begin(i + 1)});
  }
  return places;
}

int64_t row_size(const KeySpec& spec) {
  if (spec.is_row_sparse()) {
    return std::accumulate(
        spec.sizes.begin() + 1,
        spec.sizes.end(),
        int64_t{1},
        std::multiplies<>());
  }
  const bool has_rows = !spec.sizes.empty() && spec.sizes[0] > 0;
  return has_rows ? spec.total / spec.sizes[0] : 1;
}

int64_t cell_size(const KeySpec& spec, c10::ArrayRef<Place> places) {
  int64_t size = row_size(spec);
  for (const Place& place : places) {
    size = std::gcd(size, place.begin);
  }
  return size;
}

} // namespace torchkv::dist
