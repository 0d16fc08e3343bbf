#include "receipt.h"

#include <c10/util/flat_hash_map.h>

#include <algorithm>
#include <utility>

#include "../core/errors.h"
#include "../memory/layout.h"
#include "byte_counts.h"
#include "errors.h"

namespace torchkv::dist {
namespace {

bool is_plain(const at::Tensor& out) {
  return is_plain_cpu(out) && out.is_contiguous();
}

// Whether all are plain, and no two share memory.
bool are_distinct(c10::ArrayRef<Outs::TensorsOfKey> outs) {
  std::vector<std::pair<const char*, size_t>> ranges;
  for (const auto& of_key : outs) {
    for (const auto& out : of_key) {
      if (!is_plain(out)) {
        return false;
      }
      if (out.nbytes() != 0) {
        ranges.emplace_back(
            static_cast<const char*>(out.const_data_ptr()), out.nbytes());
      }
    }
  }
  std::sort(ranges.begin(), ranges.end());
  for (size_t i = 1; i < ranges.size(); ++i) {
    const auto& [data, size] = ranges[i - 1];
    if (data + size > ranges[i].first) {
      return false;
    }
  }
  return true;
}

// The pieces of the key whose slices begin at `next`, which moves behind them:
// results are in the order of the keys of a call, and of the slices of each.
Blobs pieces_of(
    const Key& key,
    const std::vector<SliceResult>& results,
    size_t& next) {
  TORCHKV_INTERNAL_ASSERT(
      next < results.size() && results[next].slice == (SliceId{key, 0}));
  Blobs pieces = results[next++].pieces;
  for (int32_t index = 1;
       next < results.size() && results[next].slice.key == key;
       ++index, ++next) {
    TORCHKV_INTERNAL_ASSERT(results[next].slice.index == index);
    const Blobs& more = results[next].pieces;
    pieces.append(more.begin(), more.end());
  }
  return pieces;
}

} // namespace

Outs outs_of(const Call& call, const Entries& entries) {
  Outs outs;
  outs.keys.single = false;
  ska::flat_hash_map<Key, size_t, KeyHash> found;
  found.reserve(entries.size());
  for (size_t i = 0; i < entries.size(); ++i) {
    const Key& key = call.keys.list[i];
    const auto [at, is_new] = found.emplace(key, outs.tensors.size());
    if (is_new) {
      outs.keys.list.push_back(key);
      outs.tensors.emplace_back();
      outs.metas.push_back(entries[i]->meta);
    }
    const auto of_key = call.outs->of(static_cast<int64_t>(i));
    outs.tensors[at->second].append(of_key.begin(), of_key.end());
  }
  return outs;
}

Receipt::Receipt(
    Runtime& runtime,
    const char* op,
    PendingPtr pending,
    Outs outs,
    std::shared_ptr<Session> session,
    int64_t rank,
    double timeout)
    : runtime_(runtime),
      op_(op),
      pending_(std::move(pending)),
      outs_(std::move(outs)),
      session_(std::move(session)),
      rank_(rank),
      timeout_(timeout) {}

void Receipt::wait() {
  const Return& result = pending_->wait();
  auto error = result.error;
  if (!error) {
    const std::lock_guard lock(mutex_);
    if (!outs_.tensors.empty()) {
      // A push before this pull has been answered before it.
      error = session_->deferred_error(&outs_.keys);
    }
    if (!error) {
      write(result);
    }
  }
  if (error) {
    throw_error(op_.c_str(), *error, rank_, timeout_);
  }
}

bool Receipt::is_completed() {
  if (!pending_->is_finished()) {
    return false;
  }
  const Return& result = pending_->wait();
  if (!result.error) {
    const std::lock_guard lock(mutex_);
    write(result);
  }
  return true;
}

void Receipt::then(std::function<void(std::exception_ptr)> done) {
  pending_->on_finish([self = shared_from_this(), done = std::move(done)] {
    self->session_->run_later([self, done] {
      std::exception_ptr error;
      try {
        self->wait();
      } catch (...) {
        error = std::current_exception();
      }
      done(error);
    });
  });
}

void Receipt::write(const Return& result) {
  if (outs_.tensors.empty()) {
    return;
  }
  size_t next = 0; // of the results
  // Together, but for outs that may share memory: the last key wins.
  const bool together = are_distinct(outs_.tensors);
  kernels::cpu::CopyBatch batch;
  for (size_t i = 0; i < outs_.tensors.size(); ++i) {
    write_key(
        batch,
        pieces_of(outs_.keys.list[i], result.results, next),
        outs_.metas[i],
        outs_.tensors[i]);
    if (!together) {
      std::exchange(batch, {}).run();
    }
  }
  batch.run();
  outs_ = {};
}

void Receipt::write_key(
    kernels::cpu::CopyBatch& batch,
    c10::ArrayRef<Blob> pieces,
    const Meta& meta,
    c10::ArrayRef<at::Tensor> outs) const {
  at::Tensor value;
  c10::SmallVector<void*, 2> plain;
  for (const auto& out : outs) {
    if (is_plain(out) && out.scalar_type() == meta.dtype) {
      plain.push_back(out.unsafeGetTensorImpl()->mutable_data());
    } else {
      if (!value.defined()) {
        value = tensor_of(pieces, meta.sizes, meta.dtype, buffers_);
      }
      runtime_.copy(out, value);
    }
    if (!out.is_inference()) {
      out.unsafeGetTensorImpl()->bump_version();
    }
    byte_counts().written += static_cast<int64_t>(out.nbytes());
  }
  add_copies(batch, pieces, plain);
}

} // namespace torchkv::dist
