#pragma once

#include <algorithm>
#include <cstdint>

#include "frame_coders.h"

// How the fields of messages are encoded that are records themselves.
namespace torchkv::dist {

// c10::ScalarType is an int8_t, and its largest element a complex double.
constexpr int64_t kEndDtype = 128;
constexpr int64_t kEndItemBytes = 17;

// Coder is a FrameReader, or a FrameWriter of a constant argument.
template <class Coder, class H>
void code_header(Coder& coder, H& header, Direction direction) {
  coder.counter(header.job);
  coder.integer(header.store);
  coder.ranged(header.rank, 0, coder.limits.num_workers);
  coder.ranged(header.server, 0, coder.limits.num_servers);
  coder.counter(header.inc);
  coder.signed_integer(header.sinc);
  coder.counter(header.committed);
  if (direction == Direction::kRequest) {
    coder.counter(header.floor);
    coder.counter(header.phase);
    coder.fixed(header.digest);
  }
}

template <class Coder, class S>
void code_slice(Coder& coder, S& slice, int32_t least_index = 0) {
  coder.key(slice.key);
  coder.ranged(slice.index, least_index, coder.limits.num_servers);
}

template <class Coder, class R>
void code_region(Coder& coder, R& region) {
  constexpr auto kEnd = static_cast<uint64_t>(kMaxCounter);
  coder.integer(region.segment);
  coder.integer(region.offset);
  coder.integer(region.size);
  coder.expect(region.offset < kEnd && region.size < kEnd);
}

template <class Coder, class G>
void code_group(Coder& coder, G& group) {
  code_slice(coder, group.slice);
  coder.counter(group.kid);
  coder.counter(group.round);
}

template <class Coder, class Ranks>
void code_ranks(Coder& coder, Ranks& ranks) {
  coder.list(ranks, 1, [&](auto& rank) {
    coder.ranged(rank, 0, coder.limits.num_workers);
  });
}

template <class Coder, class E>
void code_error(Coder& coder, E& error) {
  coder.enumerator(error.code, kLastErrorCode);
  coder.ranged(
      error.who,
      -1,
      std::max(coder.limits.num_workers, coder.limits.num_servers));
  coder.optional(
      error.slice, [&](auto& x) { code_slice(coder, x, SliceId::kServer); });
  coder.text(error.text);
  code_ranks(coder, error.missing);
}

template <class Coder, class I>
void code_row_init(Coder& coder, I& init) {
  coder.enumerator(init.id, RowInit::Id::kUniform);
  for (auto* number : {&init.mean, &init.std, &init.low, &init.high}) {
    coder.real(*number);
  }
  coder.signed_integer(init.seed);
}

template <class Coder, class S>
void code_spec(Coder& coder, S& spec) {
  coder.counter(spec.total);
  coder.expect(spec.total <= kMaxElements);
  coder.ranged(spec.dtype, 0, kEndDtype);
  coder.ranged(spec.item_bytes, 1, kEndItemBytes);
  coder.flag(spec.whole);
  coder.list(spec.sizes, 1, [&](auto& size) {
    coder.signed_integer(size);
    coder.expect(size >= 0);
  });
  coder.expect(spec.sizes.size() <= kMaxKeyDims);
  coder.optional(spec.row_init, [&](auto& x) { code_row_init(coder, x); });
}

} // namespace torchkv::dist
