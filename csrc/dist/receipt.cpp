#include "receipt.h"

#include <c10/util/flat_hash_map.h>

#include <algorithm>
#include <cstring>
#include <optional>
#include <utility>

#include "../core/errors.h"
#include "../kernels/cuda/library.h"
#include "../memory/layout.h"
#include "byte_counts.h"
#include "device_copies.h"
#include "errors.h"

namespace torchkv::dist {
namespace {

bool is_plain(const at::Tensor& out) {
  return is_plain_cpu(out) && out.is_contiguous();
}

// Whether the outs of a list are as they were when the call was made.
bool are_unchanged(const ListPlan::List& list, const at::Tensor* outs) {
  for (size_t i = 0; i < list.numbers.size(); ++i) {
    const at::Tensor& out = outs[i];
    if (!is_plain(out) || out.scalar_type() != list.dtype ||
        out.numel() != list.slices->num_elements(i)) {
      return false;
    }
  }
  return true;
}

// Whether all are plain, and no two share memory.
bool are_distinct(const Outs& outs) {
  std::vector<std::pair<const char*, size_t>> ranges;
  ranges.reserve(outs.listed.size() + outs.tensors.size());
  const auto add = [&](const at::Tensor& out) {
    if (out.nbytes() != 0) {
      ranges.emplace_back(
          static_cast<const char*>(out.const_data_ptr()), out.nbytes());
    }
  };
  const at::Tensor* listed = outs.listed.data();
  for (size_t i = 0; !outs.listed.empty() && i < outs.plan->lists.size(); ++i) {
    const ListPlan::List& list = outs.plan->lists[i];
    if (!are_unchanged(list, listed)) {
      return false;
    }
    listed += list.numbers.size();
  }
  for (const auto& out : outs.listed) {
    add(out);
  }
  for (const auto& of_key : outs.tensors) {
    for (const auto& out : of_key) {
      if (!is_plain(out)) {
        return false;
      }
      add(out);
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

// Those of a list's slice, whose results are one.
Blob part_of(const ListPlan::List& list, const SliceResult& result, size_t i) {
  return list.slices->part_of(
      result.pieces[0], i, c10::elementSize(list.dtype));
}

// Of each key, without those whose outs are listed. The results of keys that
// travel together come first, and are one where their server has kept them
// together.
std::vector<Blobs> pieces_of(
    const Outs& outs,
    const std::vector<SliceResult>& results) {
  std::vector<Blobs> pieces(outs.keys.list.size());
  size_t next = 0; // of the results
  for (size_t i = 0; outs.plan != nullptr && i < outs.plan->lists.size(); ++i) {
    const ListPlan::List& list = outs.plan->lists[i];
    const bool is_one = results[next].slice.is_list();
    if (!outs.listed.empty()) {
      next += is_one ? 1 : list.numbers.size();
      continue;
    }
    for (size_t part = 0; part < list.numbers.size(); ++part) {
      const size_t number = list.numbers[part];
      if (is_one) {
        pieces[number].push_back(part_of(list, results[next], part));
      } else {
        pieces[number] = pieces_of(outs.keys.list[number], results, next);
      }
    }
    next += is_one ? 1 : 0;
  }
  for (size_t i = 0; i < outs.num_singles(); ++i) {
    const size_t number = outs.single(i);
    pieces[number] = pieces_of(outs.keys.list[number], results, next);
  }
  return pieces;
}

// Of all outs.
Keys keys_of(const Outs& outs) {
  Keys keys = outs.keys;
  for (size_t i = 0; !outs.listed.empty() && i < outs.plan->lists.size(); ++i) {
    for (const auto& part : outs.plan->lists[i].slices->parts()) {
      keys.list.push_back(part.key);
    }
  }
  return keys;
}

// With the outs of lists among the others, in the order of the call.
Outs joined(Outs outs) {
  const ListPlan& plan = *outs.plan;
  Outs all;
  all.plan = outs.plan;
  const size_t count = outs.listed.size() + outs.tensors.size();
  all.keys.list.resize(count, Key(0));
  all.tensors.resize(count);
  all.metas.resize(count);
  for (size_t i = 0; i < outs.tensors.size(); ++i) {
    const size_t number = plan.rest[i];
    all.keys.list[number] = outs.keys.list[i];
    all.tensors[number] = std::move(outs.tensors[i]);
    all.metas[number] = std::move(outs.metas[i]);
  }
  const auto* out = outs.listed.data();
  for (const auto& list : plan.lists) {
    for (size_t i = 0; i < list.numbers.size(); ++i, ++out) {
      const size_t number = list.numbers[i];
      all.keys.list[number] = list.slices->parts()[i].key;
      all.tensors[number] = {*out};
      all.metas[number] = list.metas[i];
    }
  }
  return all;
}

} // namespace

Outs outs_of(
    const Call& call,
    const Entries& entries,
    ListPlanPtr plan,
    bool are_usual) {
  Outs outs;
  outs.plan = std::move(plan);
  outs.keys.single = false;
  if (outs.plan != nullptr && are_usual && call.outs->has_one_each()) {
    for (const auto& list : outs.plan->lists) {
      for (const size_t i : list.numbers) {
        outs.listed.push_back(call.outs->flat[static_cast<int64_t>(i)]);
      }
    }
    for (const size_t i : outs.plan->rest) {
      outs.keys.list.push_back(call.keys.list[i]);
      outs.tensors.push_back({call.outs->flat[static_cast<int64_t>(i)]});
      outs.metas.push_back(entries[i]->meta);
    }
    return outs;
  }
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
      timeout_(timeout) {
  for (const auto& outs : outs_.tensors) {
    for (const auto& out : outs) {
      const c10::Device device = out.device();
      const bool is_known =
          std::any_of(before_.begin(), before_.end(), [&](const auto& known) {
            return known.first == device;
          });
      if (!device.is_cpu() && !is_known) {
        auto event = runtime_.make_event(device);
        runtime_.record(*event, runtime_.current_stream(device));
        before_.emplace_back(device, std::move(event));
      }
    }
  }
}

void Receipt::wait(const CallerValues::OfCall* values) {
  const Return& result = pending_->wait();
  auto error = result.error;
  if (!error) {
    const std::lock_guard lock(mutex_);
    if (has_outs()) {
      // A push before this pull has been answered before it.
      error = session_->deferred_error([this] { return keys_of(outs_); });
    }
    if (!error) {
      write(result, values);
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
    write(result, nullptr);
  }
  return true;
}

void Receipt::then(std::function<void(std::exception_ptr)> done) {
  pending_->on_finish([self = shared_from_this(), done = std::move(done)] {
    self->session_->run_later([self, done] {
      std::optional<kernels::cuda::BesideCaptures> beside;
      {
        const std::lock_guard lock(self->mutex_);
        if (!self->before_.empty()) { // the outs are not all in CPU memory
          beside.emplace();
        }
      }
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

void Receipt::write(const Return& result, const CallerValues::OfCall* values) {
  if (!has_outs()) {
    return;
  }
  // Together, but for outs that may share memory: the last key wins.
  const bool together = are_distinct(outs_);
  if (!outs_.listed.empty()) {
    if (together) {
      write_lists(result.results);
    } else {
      outs_ = joined(std::move(outs_));
    }
  }
  const std::vector<Blobs> pieces = pieces_of(outs_, result.results);
  const auto in_outs =
      values == nullptr ? std::unordered_set<const void*>() : values->in_outs();
  for (const auto& [device, event] : before_) {
    runtime_.wait(*event, runtime_.current_stream(device));
  }
  kernels::cpu::CopyBatch batch;
  DeviceCopies copies(runtime_);
  for (size_t i = 0; i < outs_.tensors.size(); ++i) {
    write_key(
        batch, copies, pieces[i], outs_.metas[i], outs_.tensors[i], in_outs);
    if (!together) {
      std::exchange(batch, {}).run();
    }
  }
  batch.run();
  copies.wait();
  outs_ = {};
  before_.clear();
}

// Small values: a thread of its own would take longer than the copy.
void Receipt::write_lists(const std::vector<SliceResult>& results) const {
  size_t next = 0; // of the results
  const at::Tensor* out = outs_.listed.data();
  for (const auto& list : outs_.plan->lists) {
    const bool is_one = results[next].slice.is_list();
    const size_t size = c10::elementSize(list.dtype);
    for (size_t i = 0; i < list.numbers.size(); ++i, ++out) {
      auto* const impl = out->unsafeGetTensorImpl();
      if (is_one) {
        std::memcpy(
            impl->mutable_data(),
            results[next].pieces[0].data() +
                static_cast<size_t>(list.slices->begin(i)) * size,
            static_cast<size_t>(list.slices->num_elements(i)) * size);
      } else {
        copy_pieces(results[next + i].pieces, impl->mutable_data());
      }
      if (!impl->is_inference()) {
        impl->bump_version();
      }
    }
    byte_counts().written += list.num_bytes();
    next += is_one ? 1 : list.numbers.size();
  }
}

void Receipt::write_key(
    kernels::cpu::CopyBatch& batch,
    DeviceCopies& copies,
    c10::ArrayRef<Blob> pieces,
    const Meta& meta,
    c10::ArrayRef<at::Tensor> outs,
    const std::unordered_set<const void*>& in_outs) const {
  at::Tensor value;
  c10::SmallVector<at::Tensor, 2> on_devices;
  c10::SmallVector<void*, 2> plain;
  for (const auto& out : outs) {
    const bool is_stored = out.scalar_type() == meta.dtype;
    if (is_plain(out) && is_stored) {
      plain.push_back(out.unsafeGetTensorImpl()->mutable_data());
    } else if (out.is_cuda() && is_stored) {
      on_devices.push_back(out);
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
  if (!on_devices.empty()) {
    copies.add(pieces, meta, on_devices);
  }
  size_t begin = 0;
  for (const auto& piece : pieces) {
    if (in_outs.count(piece.owner().get()) == 0) {
      add_copies(batch, piece, plain, begin);
    }
    begin += piece.size();
  }
}

} // namespace torchkv::dist
