// What a right worker may have sent. The rest is dropped before it changes
// anything: its sender is authenticated but has a bug, and the server must
// neither crash nor lose what it holds for the others.
//
// What a worker can make a server hold is bounded by what it sends: numbers in
// messages never reserve memory. The protocol bounds neither the pushes that a
// worker may be ahead of the others nor the operations that wait in a stream
// for an earlier one, so their payloads are not bounded either. Only rank 0 can
// create slices, options and snapshots.
#include <algorithm>
#include <cmath>
#include <limits>

#include "server.h"

namespace torchkv::dist {
namespace {

// Sums of two counters never overflow, nor does a slice's number of bytes.
constexpr int64_t kMaxCount = 281'474'976'710'656; // 2^48
constexpr int32_t kMaxItemBytes = 1024;
constexpr size_t kMaxDims = 1024;
// Snapshots that rank 0 may be ahead of what this server has heard of. A
// message beyond is as good as lost: it comes again.
constexpr int64_t kMaxSnapshotsAhead = 1024;

bool is_count(int64_t count) {
  return count >= 0 && count <= kMaxCount;
}

bool is_key_slice(const SliceId& id) {
  return id.index >= 0;
}

// A row-sparse key has no elements, and may have rows of any id.
bool are_row_sparse_sizes(const KeySpec& spec) {
  int64_t row_size = 1;
  for (size_t i = 1; i < spec.sizes.size(); ++i) {
    const int64_t size = spec.sizes[i];
    if (!is_count(size) || (size != 0 && row_size > kMaxCount / size)) {
      return false;
    }
    row_size *= size;
  }
  return !spec.sizes.empty() && spec.sizes[0] >= 0 && spec.total == 0;
}

bool are_sizes(const KeySpec& spec) {
  return spec.is_row_sparse()
      ? are_row_sparse_sizes(spec)
      : std::all_of(spec.sizes.begin(), spec.sizes.end(), is_count);
}

bool is_element_size(int32_t bytes) {
  return bytes >= 0 && bytes <= kMaxItemBytes;
}

bool are_counts(const Counts& counts) {
  return std::all_of(
             counts.begin(),
             counts.end(),
             [](const auto& count) {
               return is_key_slice(count.first) && is_count(count.second);
             }) &&
      std::adjacent_find(
          counts.begin(), counts.end(), [](const auto& a, const auto& b) {
            return !(a.first < b.first);
          }) == counts.end();
}

bool is_push(Kind kind) {
  return kind == Kind::kPush || kind == Kind::kPushPull;
}

bool is_acceptable_list(const Message& message) {
  const SliceList& list = *message.list;
  int64_t num_elements = 0;
  for (const auto& part : list.parts()) {
    num_elements += part.num_elements;
    if (!is_count(part.num_elements) || !is_count(num_elements)) {
      return false;
    }
  }
  if (!message.prevs.empty() &&
      (message.prevs.size() != list.size() ||
       message.prevs[0] != message.prev ||
       !std::all_of(
           message.prevs.begin(), message.prevs.end(), [&](int64_t prev) {
             return prev >= 1 && prev < message.opno;
           }))) {
    return false;
  }
  if (message.slice != list.name() ||
      static_cast<size_t>(message.count) != list.size() || message.region ||
      message.is_encoded || message.group) {
    return false;
  }
  if (message.kind == Kind::kPull) {
    return message.pieces == 0 && message.index == -1;
  }
  return is_push(message.kind) && message.pieces == 1 &&
      message.total == num_elements && message.item_bytes > 0 &&
      is_element_size(message.item_bytes) &&
      (message.index == -1 ||
       (message.index == 0 &&
        message.payload.size() ==
            static_cast<uint64_t>(num_elements * message.item_bytes)));
}

bool is_on_the_server(Kind kind) {
  return kind == Kind::kConfig || kind == Kind::kEnter || kind == Kind::kMeet ||
      kind == Kind::kSnapshot || kind == Kind::kClose;
}

bool is_of_rank_0(Kind kind) {
  return kind == Kind::kConfig || kind == Kind::kSnapshot ||
      kind == Kind::kNorm || kind == Kind::kFactor;
}

} // namespace

bool Server::is_acceptable(const Message& message) const {
  const Header& header = message.header;
  if (header.job != config().job || header.store != config().store) {
    return false; // of an earlier start of the job, or another store
  }
  if (message.kind < Kind::kHello || is_answer(message.kind) ||
      !is_acceptable_header(message)) {
    return false;
  }
  if (message.error && message.error->code > kLastErrorCode) {
    return false;
  }
  return !is_operation(message.kind) || is_acceptable_operation(message);
}

bool Server::is_acceptable_header(const Message& message) const {
  const Header& header = message.header;
  return header.rank >= 0 && header.rank < config().num_workers &&
      header.server == sid_ && header.inc >= 1 && header.inc <= kMaxCount &&
      is_count(header.floor) && is_count(header.committed) &&
      is_count(header.phase);
}

bool Server::is_acceptable_operation(const Message& message) const {
  const Header& header = message.header;
  const Kind kind = message.kind;
  if (message.opno < 1 || message.opno > kMaxCount || message.prev < 0 ||
      message.prev >= message.opno || message.acked < 0 ||
      message.acked > message.opno || header.floor > message.opno) {
    return false;
  }
  if (is_on_the_server(kind)) {
    if (message.slice != SliceId()) {
      return false;
    }
  } else if (
      !(message.list ? is_acceptable_list(message)
                     : is_key_slice(message.slice)) ||
      (message.prev == 0 && kind != Kind::kInit)) {
    return false;
  }
  if (is_of_rank_0(kind) && header.rank != 0) {
    return false;
  }
  const bool is_two_phase =
      message.group || kind == Kind::kNorm || kind == Kind::kFactor;
  if ((is_two_phase && !sync_) || (kind == Kind::kEnter && sync_) ||
      (kind == Kind::kMeet && sid_ != 0)) {
    return false;
  }
  if (!is_count(message.gen) || !is_count(message.snap) ||
      !is_count(message.total) || !is_count(message.round) ||
      !is_count(message.base) || !is_count(message.min_version) ||
      !is_count(message.retire) || !std::isfinite(message.factor) ||
      !is_element_size(message.item_bytes) || !are_counts(message.counts)) {
    return false;
  }
  if (header.rank == 0 && message.snap > snap_seen_ + kMaxSnapshotsAhead) {
    return false;
  }
  if ((kind == Kind::kConfig &&
       (message.gen == 0 || message.retire > message.gen)) ||
      (kind == Kind::kSnapshot && message.snap == 0)) {
    return false;
  }
  return has_acceptable_payload(message);
}

bool Server::has_acceptable_payload(const Message& message) const {
  if (message.list) {
    return true; // checked
  }
  if (message.kind == Kind::kInit) {
    return is_acceptable_init(message);
  }
  const bool is_query = message.kind == Kind::kPull && message.pieces != 0;
  if (!is_push(message.kind) && !is_query) {
    return message.pieces == 0 && message.index == -1 && !message.region;
  }
  if (message.pieces < 1 || message.index < -1 ||
      message.index >= message.pieces) {
    return false;
  }
  if (const auto& region = message.region) {
    return config().push_regions && !is_query && message.pieces == 1 &&
        message.payload.size() == 0 &&
        region->offset <= std::numeric_limits<uint64_t>::max() - region->size;
  }
  return message.index == -1 || is_piece(message);
}

// Of a payload whose size nothing else says.
bool Server::is_piece(const Message& message) const {
  const size_t size = message.payload.size();
  return message.index < message.pieces - 1
      ? size == config().piece_bytes
      : size <= config().piece_bytes && (size > 0 || message.pieces == 1);
}

bool Server::is_acceptable_init(const Message& message) const {
  const KeySpec& spec = message.spec;
  if (message.region || !is_count(spec.total) || spec.item_bytes < 1 ||
      spec.item_bytes > kMaxItemBytes || spec.sizes.size() > kMaxDims ||
      !are_sizes(spec)) {
    return false;
  }
  const auto elements = num_elements(message.slice, spec);
  if (!elements) {
    return false;
  }
  if (message.pieces == 0) {
    return message.index == -1;
  }
  const auto bytes = static_cast<size_t>(*elements * spec.item_bytes);
  const size_t piece = config().piece_bytes;
  const size_t pieces =
      std::max<size_t>(1, (bytes / piece) + (bytes % piece == 0 ? 0 : 1));
  const bool is_any_size = spec.is_row_sparse();
  if (message.header.rank != 0 || message.pieces < 1 ||
      (static_cast<size_t>(message.pieces) != pieces && !is_any_size) ||
      message.index < -1 || message.index >= message.pieces) {
    return false;
  }
  if (message.index == -1 || is_any_size) {
    return message.index == -1 || is_piece(message);
  }
  const auto index = static_cast<size_t>(message.index);
  return message.payload.size() == std::min(piece, bytes - (index * piece));
}

std::optional<int64_t> Server::num_elements(
    const SliceId& id,
    const KeySpec& spec) const {
  const auto places =
      place(id.key, spec, config().num_servers, config().split_bytes);
  const auto index = static_cast<size_t>(id.index);
  if (index >= places.size()) {
    return std::nullopt;
  }
  return places[index].end - places[index].begin;
}

} // namespace torchkv::dist
