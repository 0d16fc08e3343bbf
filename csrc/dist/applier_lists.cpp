// What an applier does for lists of slices: all in one call of its store.
#include <ATen/core/Tensor.h>
#include <c10/util/ScopeExit.h>

#include <algorithm>
#include <utility>

#include "../core/errors.h"
#include "../core/in_progress.h"
#include "applier.h"
#include "errors.h"
#include "list_views.h"

namespace torchkv::dist {
namespace {

using ListParts = std::shared_ptr<const std::vector<RoundPart>>;

// The values of a list's slices, one after the other.
struct StoredList final : Value {
  ListParts parts;

  ValuePtr part(size_t i) const override {
    auto value = std::make_shared<StoredValue>();
    value->pieces.push_back((*parts)[i].of(pieces[0]));
    return value;
  }
};

c10::ScalarType dtype_of(const RoundPart& part) {
  return static_cast<c10::ScalarType>(part.spec->dtype);
}

} // namespace

// What is kept of a list from one update to the next.
struct Applier::List {
  explicit List(ListParts of)
      : parts(std::move(of)), outs(*parts, {dtype_of((*parts)[0])}) {
    keys.single = false;
    for (const auto& part : *parts) {
      keys.list.push_back(part.slice.key);
    }
  }

  // Points `values` at the pushes.
  void set_values(const Round& round, size_t num_pushes) {
    std::vector<c10::ScalarType> dtypes;
    dtypes.reserve(num_pushes);
    for (size_t i = 0; i < num_pushes; ++i) {
      dtypes.push_back(static_cast<c10::ScalarType>(round.pushes[i].dtype));
    }
    if (!values || !values->are_of(dtypes)) {
      values = std::make_unique<ListViews>(*parts, dtypes);
    }
    for (size_t i = 0; i < num_pushes; ++i) {
      const Blob& pushed = round.pushes[i].pieces[0];
      TORCH_CHECK_VALUE(
          pushed.size() == values->num_bytes(i),
          "expected ",
          values->num_bytes(i),
          " bytes, the values of a list, but got ",
          pushed.size());
      values->set(i, pushed);
    }
  }

  // Of what is another's.
  void clear() {
    outs.clear();
    if (values) {
      values->clear();
    }
  }

  const ListParts parts;
  Keys keys;
  ListViews outs;
  std::unique_ptr<ListViews> values; // null before the first update
  // At the last prepare_list(). Nothing else prepares its slices.
  int64_t num_restored = -1;
  OptimizerPtr optimizer;
};

Applier::List& Applier::list_of(const Round& round) {
  const auto known = lists_.find(round.parts.get());
  if (known != lists_.end()) {
    return *known->second;
  }
  for (auto at = lists_.begin(); at != lists_.end();) { // that came apart
    at = at->second->parts.use_count() > 1 ? std::next(at) : lists_.erase(at);
  }
  auto made = std::make_shared<List>(round.parts);
  return *lists_.emplace(round.parts.get(), std::move(made)).first->second;
}

void Applier::prepare_list(
    List& list,
    const Round& round,
    const Updates::Update& update) {
  const auto* given = std::get_if<OptimizerPtr>(&update.updater);
  const OptimizerPtr optimizer = given == nullptr ? nullptr : *given;
  if (list.num_restored == num_restored_ && list.optimizer == optimizer &&
      !update.replaces) {
    return;
  }
  for (size_t i = 0; i < list.parts->size(); ++i) {
    const RoundPart& part = (*list.parts)[i];
    const auto held = held_.find(part.slice.key);
    const bool is_held = held != held_.end() && held->second.kid == round.kid;
    prepare(
        {part.slice,
         part.spec,
         part.num_elements,
         round.kid,
         is_held ? nullptr : round.source->part(i)},
        update);
  }
  list.num_restored = update.replaces ? -1 : num_restored_;
  list.optimizer = optimizer;
}

std::optional<std::string> Applier::apply_list(
    Round& round,
    const Updates::Update& update) {
  List& list = list_of(round);
  prepare_list(list, round, update);
  const at::Tensor memory =
      buffers_.empty_codes(static_cast<int64_t>(list.outs.num_bytes(0)));
  auto result = std::make_shared<StoredList>();
  result->parts = list.parts;
  result->pieces.push_back(blob_of(memory));
  const auto done = c10::make_scope_exit([&list] { list.clear(); });
  list.set_values(round, update.replaces ? 1 : round.pushes.size());
  list.outs.set(0, memory.mutable_data_ptr());
  const Tensors& values = list.values->tensors();
  const Tensors& outs = list.outs.tensors();
  std::optional<std::string> error;
  {
    const InProgress<Store> updating(owner_);
    if (update.replaces) {
      error = error_of(
          [&] { store_.assign({"push", list.keys, &values}, update.updater); });
    } else if (
        std::holds_alternative<std::shared_ptr<OpaqueUpdater>>(
            update.updater)) {
      apply_opaque(list, round, update);
    } else {
      error = error_of(
          [&] { store_.apply({"push", list.keys, &values}, update.updater); });
    }
  }
  store_.pull({"push", list.keys, nullptr, &outs});
  round.result = std::move(result);
  return error;
}

// One slice after the other: an error is of one.
void Applier::apply_opaque(
    const List& list,
    Round& round,
    const Updates::Update& update) {
  const Tensors& all = list.values->tensors();
  std::vector<std::optional<std::string>> errors;
  bool has_errors = false;
  for (size_t i = 0; i < list.parts->size(); ++i) {
    const Keys key(list.keys.list[i]);
    const Tensors values = Tensors::replicas(all.of(static_cast<int64_t>(i)));
    errors.push_back(error_of(
        [&] { store_.apply({"push", key, &values}, update.updater); }));
    has_errors = has_errors || errors.back();
  }
  if (has_errors) {
    round.errors = std::move(errors);
  }
}

} // namespace torchkv::dist
