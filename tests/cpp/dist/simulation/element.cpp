#include "element.h"

#include <algorithm>
#include <cstring>
#include <stdexcept>

#include "random.h"

namespace torchkv::dist::simulation {

namespace {

uint64_t hash_bytes(const std::byte* data, size_t size, uint64_t hash) {
  for (size_t i = 0; i + 8 <= size; i += 8) {
    uint64_t word = 0;
    std::memcpy(&word, data + i, 8);
    hash = (hash ^ word) * 0x9e3779b97f4a7c15U;
    hash ^= hash >> 29U;
  }
  return hash;
}

} // namespace

const char* text_of(Poison poison) {
  switch (poison) {
    case Poison::kBefore:
      return "threw before";
    case Poison::kHalf:
      return "threw half";
    case Poison::kAfter:
      return "threw after";
    default:
      return "did not throw";
  }
}

Element pushed(int uid, int weight, Poison poison) {
  Element element;
  element.counts.at(static_cast<size_t>(uid)) = weight;
  element.poison = poison;
  element.chain =
      mix(static_cast<uint64_t>(uid), static_cast<uint64_t>(weight));
  return element;
}

void add(Element& value, const Element& push, int64_t rate, int64_t factor) {
  const auto scale = static_cast<int32_t>(rate * factor);
  for (size_t i = 0; i < push.counts.size(); ++i) {
    value.counts[i] += scale * push.counts[i];
  }
  value.chain = mix(value.chain ^ push.chain, static_cast<uint64_t>(scale));
}

double measure(const Element& sum) {
  int64_t total = 0;
  for (size_t i = 0; i < sum.counts.size(); ++i) {
    const auto number = static_cast<int64_t>(i);
    total += sum.counts[i] * (number * number + 3);
  }
  return static_cast<double>(total) / 3;
}

double factor_of(double sum) {
  uint64_t bits = 0;
  std::memcpy(&bits, &sum, sizeof(bits));
  return static_cast<double>(bits & 3U);
}

std::vector<std::pair<int, int64_t>> contents(const Element& element) {
  std::vector<std::pair<int, int64_t>> found;
  for (size_t i = 0; i < element.counts.size(); ++i) {
    if (element.counts[i] != 0) {
      found.emplace_back(static_cast<int>(i), element.counts[i]);
    }
  }
  return found;
}

Blob make_blob(Elements elements) {
  const auto memory = std::make_shared<Elements>(std::move(elements));
  return {memory, memory->data(), memory->size() * sizeof(Element)};
}

const Element& element_at(c10::ArrayRef<Blob> pieces, int64_t i) {
  size_t offset = static_cast<size_t>(i) * sizeof(Element);
  for (const Blob& piece : pieces) {
    if (offset < piece.size()) {
      // The memory is that of an Elements.
      return *reinterpret_cast<const Element*>(piece.data() + offset);
    }
    offset -= piece.size();
  }
  throw std::out_of_range("element_at: the pieces are too short");
}

int64_t num_elements(c10::ArrayRef<Blob> pieces) {
  size_t bytes = 0;
  for (const Blob& piece : pieces) {
    bytes += piece.size();
  }
  return static_cast<int64_t>(bytes / sizeof(Element));
}

Elements gather(c10::ArrayRef<Blob> pieces) {
  Elements elements(static_cast<size_t>(num_elements(pieces)));
  size_t offset = 0;
  auto* to = reinterpret_cast<std::byte*>(elements.data());
  for (const Blob& piece : pieces) {
    if (piece.size() != 0) {
      std::memcpy(to + offset, piece.data(), piece.size());
    }
    offset += piece.size();
  }
  return elements;
}

uint64_t checksum(const Blob& blob) {
  return hash_bytes(blob.data(), blob.size(), 1);
}

uint64_t checksum(c10::ArrayRef<Blob> pieces) {
  uint64_t hash = 1;
  for (const Blob& piece : pieces) {
    hash = hash_bytes(piece.data(), piece.size(), hash);
  }
  return hash;
}

uint64_t checksum(const Elements& elements) {
  return hash_bytes(
      reinterpret_cast<const std::byte*>(elements.data()),
      elements.size() * sizeof(Element),
      1);
}

Blobs split(const Blob& all) {
  const size_t piece_bytes = kPieceElements * sizeof(Element);
  Blobs pieces;
  for (size_t begin = 0; begin < all.size(); begin += piece_bytes) {
    pieces.push_back(
        all.slice(begin, std::min(piece_bytes, all.size() - begin)));
  }
  return pieces;
}

ValuePtr select_elements(
    const SliceId& /*slice*/,
    const KeySpec& /*spec*/,
    const Value& value,
    const Blobs& query) {
  const Elements all = gather(value.pieces);
  Elements found;
  for (const Element& number : gather(query)) {
    const auto i = static_cast<size_t>(number.unused);
    if (i >= all.size()) {
      return nullptr;
    }
    found.push_back(all[i]);
  }
  return std::make_shared<OwnValue>(std::move(found));
}

OwnValue::OwnValue(Elements elements)
    : memory_(std::make_shared<Elements>(std::move(elements))) {
  pieces =
      split(Blob(memory_, memory_->data(), memory_->size() * sizeof(Element)));
}

} // namespace torchkv::dist::simulation
