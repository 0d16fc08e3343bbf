#pragma once

#include <c10/util/ArrayRef.h>

#include <array>
#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "dist/protocol/blob.h"
#include "dist/protocol/round.h"

namespace torchkv::dist::simulation {

// What the updater does with a round: throws before it writes, after half of
// the slice, or after all of it.
enum class Poison : int32_t { kNone, kBefore, kHalf, kAfter };
// "threw half"
const char* text_of(Poison poison);

constexpr int kMaxPushes = 94;

// An element of a value: how much of each push is in it, times the weight of
// the push, the rate and the factor of the round.
struct Element {
  std::array<int32_t, kMaxPushes> counts{}; // by the number of the push
  Poison poison = Poison::kNone; // of a push
  int32_t unused = 0; // of a query: the number of an element
  // Of a value: a digest of all that was added, in this order. Of a push:
  // identifies it.
  uint64_t chain = 0;

  friend bool operator==(const Element& a, const Element& b) {
    return a.counts == b.counts && a.poison == b.poison && a.chain == b.chain;
  }
  friend bool operator!=(const Element& a, const Element& b) {
    return !(a == b);
  }
};
using Elements = std::vector<Element>;

// How sizes of the protocol's model are scaled.
constexpr int64_t kPieceElements = 2;
constexpr int64_t kSplitElements = 5;

// The element of push `uid`.
Element pushed(int uid, int weight, Poison poison);
// value += rate * factor * push
void add(Element& value, const Element& push, int64_t rate, int64_t factor);
// What the element adds to the measure of its round.
double measure(const Element& sum);
// Of all measures of a step: 0 to 3, by the last bits of their sum, so that it
// shows in which order they were added.
double factor_of(double sum);

// {number of a push: what it has added}
std::vector<std::pair<int, int64_t>> contents(const Element& element);

Blob make_blob(Elements elements);
// Element i of a slice that came in pieces.
const Element& element_at(c10::ArrayRef<Blob> pieces, int64_t i);
int64_t num_elements(c10::ArrayRef<Blob> pieces);
Elements gather(c10::ArrayRef<Blob> pieces);
// Into pieces, as the protocol wants them.
Blobs split(const Blob& all);
// Of a value: the elements that a query's have in `unused`; null if it does not
// have them.
ValuePtr select_elements(
    const SliceId& slice,
    const KeySpec& spec,
    const Value& value,
    const Blobs& query);
uint64_t checksum(const Blob& blob);
uint64_t checksum(c10::ArrayRef<Blob> pieces);
uint64_t checksum(const Elements& elements);

// A value that the simulated driver has allocated.
struct OwnValue : Value {
  explicit OwnValue(Elements elements);
  Elements& elements() {
    return *memory_;
  }
  // Whether anybody else refers to the bytes: a worker of this process keeps
  // the pieces that it got longer than the server keeps its answer.
  bool has_readers() const {
    return memory_.use_count() > 1 + static_cast<int64_t>(pieces.size());
  }

 private:
  std::shared_ptr<Elements> memory_;
};

} // namespace torchkv::dist::simulation
