#pragma once

#include <ATen/core/Tensor.h>
#include <c10/util/ArrayRef.h>

#include <cstddef>
#include <cstdint>
#include <optional>
#include <vector>

#include "../core/export.h"
#include "buffers.h"
#include "protocol/config.h"
#include "protocol/request.h"
#include "protocol/round.h"

namespace torchkv::dist {

// Of some rows of a key: what a rank asks the server of each slice for
// (pack_ids), and the answers, which are the rows' cells without gaps. Those of
// all slices, one after the other, are the rows.

TORCHKV_API std::vector<Request::Query> make_queries(
    const at::Tensor& ids,
    const KeySpec& spec,
    c10::ArrayRef<Place> places,
    const Buffers& buffers);

// Of an answer of several rows: servers copy them under the mutex of their
// node, and must go on sending heartbeats.
constexpr int64_t kMostAnswerBytes = int64_t{64} * 1024 * 1024;

// The distinct ids that a query's payload asks for, of so many cells; none if
// it is another payload.
std::optional<at::Tensor> asked_ids(const Blob& payload, int64_t num_cells);

// Copies bytes of a value that may be in several pieces.
void copy_range(
    const Blobs& pieces,
    size_t piece_bytes,
    size_t begin,
    size_t size,
    std::byte* out);

// The answer of the slice of a dense key; null if the query is not one of this
// slice. It has the value's cells at most once, and therefore not more bytes.
TORCHKV_API ValuePtr select_rows(
    const SliceId& slice,
    const KeySpec& spec,
    const Value& value,
    const Blobs& query,
    const Config& config,
    const Buffers& buffers);

} // namespace torchkv::dist
