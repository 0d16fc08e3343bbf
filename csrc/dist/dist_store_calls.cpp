// The calls of a DistStore that move values.
#include <ATen/ops/empty.h>

#include <algorithm>
#include <memory>
#include <optional>
#include <unordered_set>
#include <utility>

#include "../core/errors.h"
#include "../core/plain_dispatch.h"
#include "../store/check.h"
#include "../store/count_calls.h"
#include "../store/row_values.h"
#include "../store/shared_values.h"
#include "../store/written_outs.h"
#include "capture.h"
#include "dist_store.h"
#include "errors.h"
#include "pack_value.h"
#include "row_payload.h"

namespace torchkv::dist {
namespace {

// Makes a sum in CPU memory what an item sends.
using Fill = std::function<void(Request::Item& item, const at::Tensor& sum)>;

// A sum of which an item is filled later.
struct Deferred {
  size_t item;
  Fill fill;
  at::Tensor sum;
};

// For a call of which some sums are on devices, or behind such a call.
Session::Complete completion(HostCopy copy, std::vector<Deferred> all) {
  return [copy = std::make_shared<HostCopy>(std::move(copy)),
          all = std::move(all)](Request& request) {
    const auto copies = copy->wait();
    auto next = copies.begin();
    for (const auto& deferred : all) {
      deferred.fill(
          request.items[deferred.item],
          deferred.sum.is_cpu() ? deferred.sum : *next++);
    }
  };
}

} // namespace

std::pair<Entries, bool> DistStore::find(const Call& call) const {
  Entries entries = table_.find(call.op, call.keys);
  bool are_usual = check_values(call, entries);
  are_usual = check_outs(call, entries) && are_usual;
  if (!are_usual) {
    check_not_capturing(call, runtime_);
  }
  if (call.values == nullptr) {
    return {std::move(entries), are_usual};
  }
  const Updater updater = this->updater();
  const bool steps = std::holds_alternative<OptimizerPtr>(updater);
  for (const auto& entry : entries) {
    if (steps) {
      check_optimizable(call.op, *entry);
    }
    check_steps_rows(call.op, *entry, updater);
  }
  return {std::move(entries), are_usual};
}

WorkPtr DistStore::merge(const Call& call) {
  if (has_tables_) {
    const Entries entries = table_.find(call.op, call.keys);
    if (has_table(entries)) {
      return merge_with_tables(call, entries);
    }
  }
  return merge_values(call);
}

WorkPtr DistStore::merge_values(const Call& given) {
  const auto& values_given = given.values->flat;
  std::optional<Tensors> rows;
  if (std::any_of(values_given.begin(), values_given.end(), is_sparse_coo)) {
    rows = with_rows(given, table_.find(given.op, given.keys), runtime_);
  }
  Call call = given;
  call.values = rows ? &*rows : given.values;
  const auto [found, are_usual] = find(call);
  const Entries& all = found;
  check_expected_keys(call.op);
  const Updater updater = this->updater();
  const CompressionPtr compression = compression_of(call, all);
  count_call(call, all, are_usual);
  const auto* const optimizer = std::get_if<OptimizerPtr>(&updater);
  const bool is_two_phase = optimizer != nullptr &&
      ((*optimizer)->gradient.max_norm != 0 ||
       (*optimizer)->gradient.skip_nonfinite);
  // An opaque updater has the keys in the order of the call.
  const bool is_opaque =
      std::holds_alternative<std::shared_ptr<OpaqueUpdater>>(updater);
  const ListPlanPtr plan =
      rows || compression != nullptr || is_two_phase || is_opaque
      ? nullptr
      : plan_of(call, all, are_usual);
  std::optional<RestOfCall> rest;
  if (plan != nullptr) {
    rest.emplace(*plan, call, all);
  }
  const Entries& entries = rest ? rest->entries : all;
  const Call staged{
      given.op,
      rest ? rest->keys : given.keys,
      rest ? &rest->values : given.values};
  c10::SmallVector<c10::ScalarType, 4> dtypes;
  for (const auto& entry : entries) {
    dtypes.push_back(entry->meta.dtype);
  }
  {
    const std::lock_guard lock(node_->mutex());
    node_->reclaim(); // so that sums are written in place
  }
  const bool pulls = call.outs != nullptr;
  CallerValues::OfCall values(
      session_->applier().callers(), staging_.buffers());
  Request request(pulls ? Request::Kind::kPushPull : Request::Kind::kPush);
  if (plan != nullptr) {
    add_lists(*plan, call, request);
  }
  std::vector<Deferred> deferred;
  std::vector<at::Tensor> on_devices; // of them
  // Compressed behind the queued calls, as sent: the bits depend on the order.
  const bool is_queued = compression != nullptr && session_->has_queued();
  std::unordered_set<const Entry*> with_sparse; // values: sent as they are
  for (size_t i = 0; rows && i < entries.size(); ++i) {
    const auto of_key = given.values->of(static_cast<int64_t>(i));
    if (std::any_of(of_key.begin(), of_key.end(), is_sparse_coo)) {
      with_sparse.insert(entries[i].get());
    }
  }
  const auto is_compressed = [&](size_t i) {
    return compression != nullptr &&
        compression->get().codec_of(entries[i]->key).id != Codec::Id::kNone &&
        with_sparse.count(entries[i].get()) == 0;
  };
  const auto fill_of = [&](size_t i) -> Fill {
    if (!is_compressed(i)) {
      return [](auto& item, const auto& sum) { item.value = blob_of(sum); };
    }
    // A queued call may outlive the store.
    return [compression,
            entry = entries[i],
            rank = rank(),
            places = places_of(*entries[i]),
            buffers = staging_.buffers()](auto& item, const auto& sum) {
      item.codes = pack_value(*compression, *entry, rank, sum, places, buffers);
    };
  };
  const bool is_waited = pulls || call.options.async_op;
  // Python may hold up an update for as long as it likes.
  const bool in_place = pulls && !call.options.async_op && !is_opaque;
  const auto elsewhere = [&](size_t i) {
    return places_elsewhere(*entries[i]);
  };
  const auto is_read_now = [&](size_t i) {
    return !is_queued && is_compressed(i);
  };
  const bool writes_outs =
      in_place && are_usual && !is_queued && can_write_with_sums(call, all);
  const auto out_of = [&](size_t i) {
    const size_t number = plan == nullptr ? i : plan->rest[i];
    const auto outs = writes_outs ? call.outs->of(static_cast<int64_t>(number))
                                  : c10::ArrayRef<at::Tensor>();
    return outs.size() == 1 ? outs[0] : at::Tensor();
  };
  const Staging::InPlace reads{
      is_read_now,
      in_place && !is_queued ? &values : nullptr,
      out_of,
      elsewhere};
  for (auto& sum :
       staging_.sum(staged, rows ? &*rows : nullptr, dtypes, reads)) {
    Request::Item item;
    item.key = sum.key;
    item.own = std::move(sum.own);
    const bool is_on_device = !sum.value.device().is_cpu();
    if (is_on_device) {
      on_devices.push_back(sum.value);
    }
    if (sum.rows != nullptr) {
      const Entry& entry = *entries[sum.number];
      item.codes = pack_rows(
          *sum.rows,
          sum.value,
          spec_of(entry.meta, /*whole=*/false),
          places_of(entry),
          staging_.buffers());
    } else if (is_on_device || (is_queued && is_compressed(sum.number))) {
      deferred.push_back(
          {request.items.size(), fill_of(sum.number), sum.value});
    } else if (
        item.own.size() != 0 && item.own.data() == sum.value.const_data_ptr()) {
      item.value = item.own;
    } else {
      fill_of(sum.number)(item, sum.value);
    }
    item.dtype = static_cast<int32_t>(sum.value.scalar_type());
    item.item_bytes = static_cast<int32_t>(sum.value.element_size());
    item.priority = call.options.priority;
    request.items.push_back(std::move(item));
  }
  if (optimizer != nullptr) {
    const GradientSpec gradient = (*optimizer)->gradient;
    request.two_phase = is_two_phase;
    request.factor = [gradient, norms = norms_](double squared_norm) {
      return norms->decide(gradient, squared_norm);
    };
    if (!request.two_phase) {
      norms_->clear_norm();
    }
  }
  if (rank() == 0) {
    take_snapshot(snapshots_.due_before(call.keys));
  }
  auto pending = begin(
      call.op,
      std::move(request),
      /*is_watched=*/!is_waited,
      deferred.empty() ? nullptr
                       : completion(
                             staging_.copy_to_host(std::move(on_devices)),
                             std::move(deferred)));
  if (rank() == 0) {
    take_snapshot(snapshots_.due_after(call.keys));
  }
  if (!is_waited) {
    if (pending->is_finished()) {
      const auto& error = pending->wait().error;
      if (error && error->code == ErrorCode::kUnknown) {
        raise_deferred(call.op, &call.keys); // of this call, not of a later one
      }
    }
    return nullptr;
  }
  WorkPtr work = finish(
      call,
      std::move(pending),
      pulls ? outs_of(call, all, plan, are_usual) : Outs(),
      &values);
  values.set_merged();
  return work;
}

void DistStore::take_snapshot(std::optional<int64_t> step) {
  if (step) {
    Request request(Request::Kind::kSnapshot);
    request.step = *step;
    snapshots_.begun(begin("push", std::move(request)));
  }
}

WorkPtr DistStore::pull(const Call& call) {
  if (has_tables_) {
    const Entries entries = table_.find(call.op, call.keys);
    if (has_table(entries)) {
      return pull_with_tables(call, entries);
    }
  }
  if (dense_outs(call)) { // some are sparse
    pull_sparse(call);
    return call.options.async_op
        ? c10::make_intrusive<Work>(
              runtime_, Work::Parts(), std::vector<at::Tensor>())
        : nullptr;
  }
  const Call pulled{call.op, call.keys, nullptr, call.outs, call.options};
  const auto [entries, are_usual] = find(pulled);
  raise_deferred(call.op, &call.keys);
  count_call(pulled, entries, are_usual);
  const ListPlanPtr plan = plan_of(pulled, entries, are_usual);
  Outs outs = outs_of(pulled, entries, plan, are_usual);
  Request request(Request::Kind::kPull);
  if (plan != nullptr) {
    add_lists(*plan, pulled, request);
  }
  for (size_t i = 0; i < outs.num_singles(); ++i) {
    Request::Item item;
    item.key = outs.keys.list[outs.single(i)];
    item.priority = call.options.priority;
    item.min_version = std::max<int64_t>(0, call.options.min_version);
    request.items.push_back(std::move(item));
  }
  return finish(pulled, begin(call.op, std::move(request)), std::move(outs));
}

std::vector<at::Tensor> DistStore::pull(
    const Keys& keys,
    const CallOptions& options) {
  constexpr auto* op = "pull";
  check_not_empty(op, keys);
  const PlainDispatch plain;
  std::vector<at::Tensor> result;
  Keys dense;
  dense.single = keys.single;
  Tensors outs;
  const Entries entries = table_.find(op, keys);
  for (const auto& entry : entries) {
    result.emplace_back();
    if (entry->rows == nullptr) {
      result.back() =
          at::empty(entry->meta.sizes, at::TensorOptions(entry->meta.dtype));
      dense.list.push_back(entry->key);
      outs.append(result.back());
      outs.end_group();
    }
  }
  if (dense.size() != 0) {
    pull({op, dense, nullptr, &outs, options});
  }
  for (size_t i = 0; i < entries.size(); ++i) {
    if (entries[i]->rows != nullptr) {
      const Table table = pull_table(op, *entries[i], options.min_version);
      result[i] = sparse_of_rows(table.ids, table.values, entries[i]->meta);
    }
  }
  return result;
}

void DistStore::erase(const Keys& keys) {
  constexpr auto* op = "delete";
  check_not_empty(op, keys);
  check_no_repeats(op, table_.find(op, keys));
  Request request(Request::Kind::kDelete);
  for (const auto& key : keys.list) {
    Request::Item item;
    item.key = key;
    request.items.push_back(std::move(item));
  }
  const auto forget = [&] {
    table_.erase(op, keys);
    plans_.clear();
    {
      const std::lock_guard lock(updater_mutex_);
      for (const auto& key : keys.list) {
        split_keys_.erase(key);
        whole_keys_.erase(key);
      }
    }
    staging_.erase(keys);
  };
  const auto pending = begin(op, std::move(request));
  try {
    wait(op, *pending);
  } catch (...) {
    if (session_->withdraw(pending)) { // the servers do it all the same
      forget();
    }
    throw;
  }
  forget();
}

WorkPtr DistStore::finish(
    const Call& call,
    PendingPtr pending,
    Outs outs,
    const CallerValues::OfCall* values) const {
  auto receipt = std::make_shared<Receipt>(
      runtime_,
      call.op,
      std::move(pending),
      std::move(outs),
      session_,
      rank(),
      timeout_);
  if (call.options.async_op) {
    return c10::make_intrusive<Work>(runtime_, std::move(receipt));
  }
  receipt->wait(values);
  return nullptr;
}

} // namespace torchkv::dist
