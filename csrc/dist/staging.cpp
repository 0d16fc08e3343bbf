#include "staging.h"

#include <ATen/ExpandUtils.h>
#include <ATen/OpMathType.h>
#include <c10/core/ScalarType.h>

#include <algorithm>
#include <utility>

#include "../core/plain_dispatch.h"
#include "../core/promote.h"
#include "../core/sparse.h"
#include "../memory/layout.h"
#include "../store/check.h"
#include "../store/row_values.h"
#include "byte_counts.h"

namespace torchkv::dist {
namespace {

LocalStore::Options device_options() {
  LocalStore::Options options;
  options.policy = Placement::Policy::kShardAll;
  return options;
}

// Worth the names and locks that reading it in place costs.
bool is_large(const at::Tensor& value) {
  constexpr size_t kLarge = size_t{16} << 10U;
  return !is_sparse_coo(value) && value.nbytes() >= kLarge;
}

at::Tensor empty_on(
    Runtime& runtime,
    c10::IntArrayRef sizes,
    c10::ScalarType dtype,
    c10::Device device) {
  return runtime.allocate(
      sizes, at::detail::defaultStrides(sizes), dtype, device);
}

} // namespace

// A part of a call.
struct Staging::PartOfCall {
  Keys keys;
  Tensors values;

  PartOfCall() {
    keys.single = false;
  }
  Call call(const char* op) const {
    return {op, keys, &values};
  }
  void add(const Key& key, c10::ArrayRef<at::Tensor> of_key) {
    keys.list.push_back(key);
    for (const auto& value : of_key) {
      values.append(value);
    }
    values.end_group();
  }
};

// What a call has for a key.
struct Staging::Group {
  size_t index = 0; // of the sum
  size_t num_values = 0;
  bool has_rows_only = true; // all values are sparse
  bool has_any_rows =
      false; // sparse ones differ in how many rows they may have
  c10::ScalarType dtype = c10::ScalarType::Undefined; // of all values
  c10::ScalarType stored = c10::ScalarType::Undefined;
  c10::SmallVector<int64_t, 4> sizes;
  c10::Device device = c10::kCPU; // or the first accelerator

  void add(const at::Tensor& value) {
    dtype = num_values == 0 ? value.scalar_type()
                            : promoted(dtype, value.scalar_type());
    has_any_rows = has_any_rows ||
        (num_values != 0 && value.sizes() != at::IntArrayRef(sizes));
    sizes.assign(value.sizes().begin(), value.sizes().end());
    if (device.is_cpu()) {
      device = value.device();
    }
    has_rows_only = has_rows_only && is_sparse_coo(value);
    ++num_values;
  }

  c10::ScalarType accumulation() const {
    return at::toOpMathType(promoted(dtype, stored));
  }
  c10::ScalarType dtype_of_sum() const {
    return num_values == 1 ? dtype : accumulation();
  }
};

Staging::Staging(Runtime& runtime, const std::shared_ptr<SharedMemory>& memory)
    : runtime_(runtime),
      buffers_(memory),
      pinned_(memory, runtime),
      streams_(std::make_shared<Streams>(runtime)),
      store_(runtime, store_options(buffers_)),
      device_store_(runtime, device_options()),
      row_store_(runtime, LocalStore::Options()) {}

std::vector<Staging::Sum> Staging::sum(
    const Call& given,
    const Tensors* rows,
    c10::ArrayRef<c10::ScalarType> dtypes,
    const InPlace& in_place) {
  std::vector<Sum> sums;
  Groups groups;
  groups.reserve(given.keys.list.size());
  sums.reserve(given.keys.list.size());
  bool are_on_cpu = true;
  for (size_t i = 0; i < given.keys.list.size(); ++i) {
    const Key& key = given.keys.list[i];
    Group& group = groups[key];
    if (group.num_values == 0) {
      group.index = sums.size();
      sums.push_back({key, i, {}, {}, {}});
      group.stored = dtypes[i];
    }
    for (const auto& value : given.values->of(static_cast<int64_t>(i))) {
      group.add(value);
    }
    are_on_cpu = are_on_cpu && group.device.is_cpu();
  }
  std::unordered_map<Key, at::Tensor, KeyHash> on_devices;
  const std::lock_guard lock(mutex_);
  std::optional<PartOfCall> dense; // where keys have only sparse values
  if (rows != nullptr) {
    dense = sum_rows(given, *rows, groups, sums);
  }
  const Call call = dense ? dense->call(given.op) : given;
  const auto& values = call.values->flat;
  bool may_be_in_place = in_place.values != nullptr && are_on_cpu &&
      std::any_of(values.begin(), values.end(), is_large);
  for (size_t i = 0; i < call.keys.list.size() && are_on_cpu; ++i) {
    const Group& group = groups.at(call.keys.list[i]);
    may_be_in_place =
        may_be_in_place || in_place.is_read_now(sums[group.index].number);
  }
  if (may_be_in_place) {
    const PartOfCall rest = read_in_place(call, groups, in_place, sums);
    sum_in(store_, rest.call(call.op), groups);
  } else if (are_on_cpu) {
    sum_in(store_, call, groups);
  } else {
    sum_on_devices(call, groups, on_devices);
  }
  for (auto& sum : sums) {
    if (sum.value.defined()) {
      continue;
    }
    const auto found = on_devices.find(sum.key);
    sum.value = found != on_devices.end() ? std::move(found->second)
                                          : store_.lease(sum.key).first;
    byte_counts().summed += static_cast<int64_t>(sum.value.nbytes());
  }
  return sums;
}

Staging::PartOfCall Staging::sum_rows(
    const Call& call,
    const Tensors& rows,
    const Groups& groups,
    std::vector<Sum>& sums) {
  const PlainDispatch plain;
  PartOfCall rest;
  std::unordered_map<Key, PartOfCall, KeyHash> several; // values of a key
  for (size_t i = 0; i < call.keys.list.size(); ++i) {
    const Key& key = call.keys.list[i];
    const Group& group = groups.at(key);
    const auto number = static_cast<int64_t>(i);
    if (!group.has_rows_only) {
      rest.add(key, call.values->of(number));
      continue;
    }
    const int64_t first = rows.begin(number);
    const bool is_single =
        group.num_values == 1 && call.values->of(number).size() == 1;
    const auto encoding = is_single
        ? std::dynamic_pointer_cast<const RowSparse>(
              rows.encodings[static_cast<size_t>(first)])
        : nullptr;
    // As pushed, with its repeated ids; unless they are more than there are
    // rows.
    if (encoding != nullptr && encoding->ids.numel() <= group.sizes[0]) {
      Sum& sum = sums[group.index];
      sum.value = rows.flat[first].to(c10::kCPU);
      sum.rows = encoding;
    } else {
      several[key].add(key, call.values->of(number));
    }
  }
  for (const auto& [key, part] : several) {
    const Group& group = groups.at(key);
    sum_rows_of({call.op, part.keys, &part.values}, group, sums[group.index]);
  }
  return rest;
}

// Merged by id.
void Staging::sum_rows_of(const Call& call, const Group& group, Sum& sum) {
  const Where where{call.op, sum.key};
  const Meta meta = row_sparse_meta(
      where,
      group.has_any_rows ? std::nullopt : std::optional(group.sizes[0]),
      c10::IntArrayRef(group.sizes).slice(1),
      group.accumulation()); // also of one value, as ids repeat
  const auto known = row_store_.meta(call.op, sum.key);
  const bool fits =
      known && known->dtype == meta.dtype && known->sizes == meta.sizes;
  if (known && !fits) {
    row_store_.erase(sum.key);
  }
  if (!fits) {
    row_store_.init_rows(sum.key, meta, RowInit());
  }
  row_store_.merge(call);
  const at::Tensor merged = row_store_.pull(sum.key, CallOptions())[0];
  const PlainDispatch plain;
  auto rows = std::make_shared<RowSparse>();
  rows->ids = sparse_impl(merged).indices()[0].contiguous();
  rows->is_distinct = true;
  sum.rows = std::move(rows);
  sum.value = sparse_impl(merged).values();
}

// The memory of the key's last copy, if nothing refers to it any more.
at::Tensor Staging::copy_of(const Key& key, const Group& group) {
  at::Tensor& copy = copies_[key];
  { // use_count() alone would not see what readers have done before
    const at::Tensor owner = copy;
  }
  if (!copy.defined() || copy.use_count() != 1 ||
      copy.scalar_type() != group.dtype ||
      copy.sizes() != c10::IntArrayRef(group.sizes)) {
    copy = buffers_.empty(group.sizes, group.dtype);
  }
  return copy;
}

Staging::PartOfCall Staging::read_in_place(
    const Call& call,
    const Groups& groups,
    const InPlace& in_place,
    std::vector<Sum>& sums) {
  PartOfCall rest;
  kernels::cpu::CopyBatch batch;
  for (size_t i = 0; i < call.keys.list.size(); ++i) {
    const Key& key = call.keys.list[i];
    const Group& group = groups.at(key);
    const auto values = call.values->of(static_cast<int64_t>(i));
    const size_t number = sums[group.index].number;
    const bool is_read_now = in_place.is_read_now(number);
    const bool is_single = group.num_values == 1 && values.size() == 1;
    if (!is_single || !is_plain_cpu(values[0]) || !values[0].is_contiguous() ||
        (!is_read_now &&
         (in_place.values == nullptr || !is_large(values[0])))) {
      rest.add(key, values);
      continue;
    }
    const at::Tensor& value = values[0];
    Sum& sum = sums[group.index];
    if (is_read_now) {
      sum.value = value;
      continue;
    }
    sum.own = in_place.values->add(value, in_place.out_of(number));
    const std::vector<Place> elsewhere = in_place.elsewhere(number);
    sum.value = elsewhere.empty() ? value : copy_of(key, group);
    const size_t item = value.element_size();
    for (const Place& place : elsewhere) {
      const size_t begin = static_cast<size_t>(place.begin) * item;
      const size_t size = static_cast<size_t>(place.end - place.begin) * item;
      batch.add(
          sum.own.data() + begin,
          size,
          static_cast<std::byte*>(sum.value.mutable_data_ptr()) + begin);
      byte_counts().summed += static_cast<int64_t>(size);
    }
  }
  batch.run();
  return rest;
}

void Staging::sum_in(
    LocalStore& store,
    const Call& call,
    const Groups& groups) {
  if (call.keys.list.empty()) {
    return;
  }
  for (const Key& key : call.keys.list) {
    const Group& group = groups.at(key);
    const c10::ScalarType dtype = group.dtype_of_sum();
    const auto meta = store.meta(call.op, key);
    const bool fits =
        meta && meta->dtype == dtype && meta->sizes == group.sizes;
    if (meta && !fits) {
      store.erase(key);
    }
    if (!fits) {
      const Tensors value(
          &store == &store_
              ? buffers_.empty(group.sizes, dtype)
              : empty_on(runtime_, group.sizes, dtype, group.device));
      store.insert({call.op, key, &value});
    }
  }
  store.merge({call.op, call.keys, call.values});
}

void Staging::sum_on_devices(
    const Call& call,
    const Groups& groups,
    std::unordered_map<Key, at::Tensor, KeyHash>& sums) {
  PartOfCall on_cpu;
  PartOfCall several; // values of a key
  for (size_t i = 0; i < call.keys.list.size(); ++i) {
    const Key& key = call.keys.list[i];
    const Group& group = groups.at(key);
    const auto values = call.values->of(static_cast<int64_t>(i));
    if (group.device.is_cpu()) {
      on_cpu.add(key, values);
    } else if (group.num_values > 1) {
      several.add(key, values);
    } else if (!values.empty()) {
      at::Tensor copy =
          empty_on(runtime_, group.sizes, group.dtype, group.device);
      runtime_.copy(copy, values[0]);
      sums[key] = std::move(copy);
    }
  }
  sum_in(store_, on_cpu.call(call.op), groups);
  sum_in(device_store_, several.call(call.op), groups);
  for (const Key& key : several.keys.list) {
    if (sums.count(key) == 0) {
      sums[key] = device_store_.lease(key).first;
    }
  }
}

HostCopy Staging::copy_to_host(std::vector<at::Tensor> sums) const {
  return HostCopy(streams_, pinned_, std::move(sums));
}

void Staging::erase(const Keys& keys) {
  const std::lock_guard lock(mutex_);
  for (const auto& key : keys.list) {
    copies_.erase(key);
  }
  for (auto* store : {&store_, &device_store_, &row_store_}) {
    for (const auto& key : keys.list) {
      if (store->meta("delete", key)) {
        store->erase(key);
      }
    }
  }
}

} // namespace torchkv::dist
