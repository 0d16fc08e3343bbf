#include "row_slices.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/view_as_real.h>
#include <c10/core/InferenceMode.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <memory>
#include <new>
#include <utility>

#include "../core/plain_dispatch.h"
#include "../core/sparse.h"
#include "../kernels/cpu/row_memory.h"
#include "growing_memory.h"
#include "row_table.h"
#include "slices.h"

namespace torchkv {
namespace {

// The tensors of a slice by slot.
std::array<at::Tensor*, 3 + kMaxStates> tensors_of(Slice& slice) {
  return {
      &slice.value,
      &slice.master,
      &slice.accumulated,
      &slice.states[0],
      &slice.states[1],
      &slice.states[2]};
}
static_assert(kMaxStates == 3);

kernels::cpu::RowMemory memory_of(
    const Meta& meta,
    const at::Tensor& tensor,
    int64_t first = 0) {
  kernels::cpu::RowMemory memory;
  memory.row_size = meta.row_size();
  memory.dtype = tensor.scalar_type();
  memory.data = static_cast<char*>(tensor.mutable_data_ptr());
  memory.data += first * memory.row_bytes();
  return memory;
}

c10::SmallVector<int64_t, 4> sizes_of(const Meta& meta, int64_t num_rows) {
  c10::SmallVector<int64_t, 4> sizes(meta.sizes);
  sizes[0] = num_rows;
  return sizes;
}

void free_memory(void* memory) {
  delete static_cast<GrowingMemory*>(memory);
}

// That of a tensor of make_tensor(), or null.
GrowingMemory* memory_in(const at::Tensor& tensor) {
  return tensor.storage().data_ptr().cast_context<GrowingMemory>(&free_memory);
}

// A tensor without rows, whose memory may grow.
at::Tensor make_tensor(const Meta& meta, c10::ScalarType dtype) {
  const c10::InferenceMode normal(false);
  auto memory = std::make_unique<GrowingMemory>();
  c10::DataPtr data(nullptr, memory.get(), &free_memory, c10::kCPU);
  memory.release(); // NOLINT(bugprone-unused-return-value): `data` has it
  c10::Storage storage(
      c10::Storage::use_byte_size_t(),
      0,
      std::move(data),
      /*allocator=*/nullptr,
      /*resizable=*/false);
  at::Tensor tensor = at::detail::make_tensor<c10::TensorImpl>(
      std::move(storage),
      c10::DispatchKeySet(c10::DispatchKey::CPU),
      c10::scalarTypeToTypeMeta(dtype));
  tensor.unsafeGetTensorImpl()->set_sizes_contiguous(sizes_of(meta, 0));
  return tensor;
}

// Gives a tensor of make_tensor() memory of so many bytes, which may move it.
void reallocate(const at::Tensor& tensor, size_t num_bytes) {
  auto* const impl = tensor.storage().unsafeGetStorageImpl();
  GrowingMemory* const memory = memory_in(tensor);
  memory->resize(num_bytes);
  c10::DataPtr before = impl->set_data_ptr(
      c10::DataPtr(memory->data(), memory, &free_memory, c10::kCPU));
  before.release_context(); // which is in use
  impl->set_nbytes(num_bytes);
}

size_t row_bytes(const Meta& meta, const at::Tensor& tensor) {
  return static_cast<size_t>(meta.row_size()) * tensor.element_size();
}

// Memory for so many rows, of which a tensor keeps those that it has.
void reserve(const Meta& meta, at::Tensor& tensor, int64_t num_rows) {
  if (memory_in(tensor) == nullptr) {
    at::Tensor own = make_tensor(meta, tensor.scalar_type());
    reallocate(own, tensor.nbytes());
    own.unsafeGetTensorImpl()->set_sizes_contiguous(tensor.sizes());
    if (tensor.nbytes() != 0) {
      std::memcpy(
          own.mutable_data_ptr(), tensor.const_data_ptr(), tensor.nbytes());
    }
    tensor = std::move(own);
  }
  const size_t needed = static_cast<size_t>(num_rows) * row_bytes(meta, tensor);
  const size_t has = tensor.storage().nbytes();
  if (needed > has) {
    reallocate(tensor, std::max(needed, has + has / 2));
  }
}

// Frees memory that is not needed for long.
void shrink(const Meta& meta, at::Tensor& tensor, int64_t num_rows) {
  constexpr size_t kSmall = size_t{1} << 20U;
  const size_t needed = static_cast<size_t>(num_rows) * row_bytes(meta, tensor);
  const size_t has = tensor.storage().nbytes();
  if (has > kSmall && has / 4 > needed && memory_in(tensor) != nullptr) {
    try {
      reallocate(tensor, 2 * needed);
    } catch (const std::bad_alloc&) { // of the smaller memory
      return;
    }
  }
}

void resize(Entry& entry) {
  const int64_t num_rows = entry.rows->size();
  Slice& slice = entry.slices[0];
  for (at::Tensor* tensor : tensors_of(slice)) {
    if (tensor->defined()) {
      tensor->unsafeGetTensorImpl()->set_sizes_contiguous(
          sizes_of(entry.meta, num_rows));
    }
  }
  slice.end = slice.value.numel();
  entry.rows->num_bytes = static_cast<int64_t>(slice.value.nbytes());
}

// The rows from `first` on get what a new row begins with.
void init_new(Entry& entry, int64_t first, const RuleSpec* rule) {
  const PlainDispatch plain;
  Slice& slice = entry.slices[0];
  const RowTable& rows = *entry.rows;
  const int64_t count = rows.size() - first;
  kernels::cpu::init_rows(
      memory_of(entry.meta, slice.value, first),
      rows.ids().data() + first,
      count,
      rows.init);
  const auto added = [&](const at::Tensor& tensor) {
    return tensor.narrow(0, first, count);
  };
  if (slice.master.defined()) {
    added(slice.master).copy_(added(slice.value));
  }
  if (slice.accumulated.defined()) {
    added(slice.accumulated).zero_();
  }
  const at::Tensor weights =
      added(slice.master.defined() ? slice.master : slice.value);
  for (size_t i = 0; i < kMaxStates; ++i) {
    if (slice.states[i].defined()) {
      init_state(added(slice.states[i]), rule, i, weights);
    }
  }
}

} // namespace

void make_row_sparse(Entry& entry, const RowInit& init) {
  entry.rows = std::make_unique<RowTable>(init);
  const auto strides = at::detail::defaultStrides(sizes_of(entry.meta, 1));
  entry.strides.assign(strides.begin(), strides.end());
  entry.device = c10::kCPU;
  Slice slice;
  slice.home = {c10::kCPU};
  slice.value = make_tensor(entry.meta, entry.meta.dtype);
  entry.slices.push_back(std::move(slice));
}

at::Tensor slots_of(Entry& entry, const at::Tensor& ids, const RuleSpec* rule) {
  const PlainDispatch plain;
  RowTable& rows = *entry.rows;
  const int64_t count = ids.numel();
  const auto* const given = ids.const_data_ptr<int64_t>();
  const at::Tensor result = at::empty({count}, ids.options());
  auto* const slots = result.mutable_data_ptr<int64_t>();
  rows.find(given, count, slots);
  const int64_t first = rows.size();
  rows.add(given, count, slots);
  if (rows.size() == first) {
    return result;
  }
  try {
    for (at::Tensor* tensor : tensors_of(entry.slices[0])) {
      if (tensor->defined()) {
        reserve(entry.meta, *tensor, rows.size());
      }
    }
  } catch (...) {
    rows.truncate(first);
    throw;
  }
  resize(entry);
  init_new(entry, first, rule);
  return result;
}

void remove_rows(Entry& entry, const int64_t* ids, int64_t count) {
  const RowTable::Moves moves = entry.rows->remove(ids, count);
  const auto num_moves = static_cast<int64_t>(moves.from.size());
  for (at::Tensor* tensor : tensors_of(entry.slices[0])) {
    if (tensor->defined()) {
      kernels::cpu::move_rows(
          memory_of(entry.meta, *tensor),
          moves.from.data(),
          moves.to.data(),
          num_moves);
    }
  }
  resize(entry);
  for (at::Tensor* tensor : tensors_of(entry.slices[0])) {
    if (tensor->defined()) {
      shrink(entry.meta, *tensor, entry.rows->size());
    }
  }
}

void keep_rows(Entry& entry, c10::ArrayRef<at::Tensor> slots) {
  std::vector<bool> is_kept(static_cast<size_t>(entry.rows->size()));
  for (const auto& of_value : slots) {
    const auto* const begin = of_value.const_data_ptr<int64_t>();
    std::for_each(begin, begin + of_value.numel(), [&](int64_t slot) {
      is_kept[static_cast<size_t>(slot)] = true;
    });
  }
  std::vector<int64_t> removed;
  for (size_t slot = 0; slot < is_kept.size(); ++slot) {
    if (!is_kept[slot]) {
      removed.push_back(entry.rows->ids()[slot]);
    }
  }
  if (!removed.empty()) {
    remove_rows(entry, removed.data(), static_cast<int64_t>(removed.size()));
  }
}

void copy_rows(
    const Entry& entry,
    const at::Tensor& ids,
    const at::Tensor& out) {
  const int64_t count = ids.numel();
  if (out.numel() == 0) {
    return;
  }
  std::vector<int64_t> slots(static_cast<size_t>(count));
  const auto* const given = ids.const_data_ptr<int64_t>();
  entry.rows->find(given, count, slots.data());
  kernels::cpu::gather_rows(
      memory_of(entry.meta, entry.slices[0].value),
      slots.data(),
      given,
      count,
      entry.rows->init,
      static_cast<char*>(out.mutable_data_ptr()));
}

void write_rows(Entry& entry, const at::Tensor& sparse) {
  const c10::InferenceMode normal(false);
  const PlainDispatch plain;
  const at::Tensor rows = sparse.coalesce();
  const at::Tensor ids = sparse_impl(rows).indices()[0].contiguous();
  const at::Tensor given = sparse_impl(rows).values().contiguous();
  const at::Tensor slots = slots_of(entry, ids, nullptr);
  if (given.numel() != 0) {
    kernels::cpu::scatter_rows(
        memory_of(entry.meta, entry.slices[0].value),
        slots.const_data_ptr<int64_t>(),
        ids.numel(),
        static_cast<const char*>(given.const_data_ptr()));
  }
}

std::pair<at::Tensor, at::Tensor> rows_by_id(const Entry& entry) {
  const PlainDispatch plain;
  const at::Tensor slots = slots_by_id(entry);
  return {
      row_ids(entry).index_select(0, slots),
      entry.slices[0].value.index_select(0, slots)};
}

at::Tensor row_ids(const Entry& entry) {
  const c10::InferenceMode normal(false);
  const PlainDispatch plain;
  const auto& ids = entry.rows->ids();
  const at::Tensor result = at::empty(
      {entry.rows->size()}, at::TensorOptions(c10::kCPU).dtype(c10::kLong));
  std::copy(ids.begin(), ids.end(), result.mutable_data_ptr<int64_t>());
  return result;
}

at::Tensor slots_by_id(const Entry& entry) {
  const c10::InferenceMode normal(false);
  const PlainDispatch plain;
  const auto slots = entry.rows->slots_by_id();
  const at::Tensor result = at::empty(
      {entry.rows->size()}, at::TensorOptions(c10::kCPU).dtype(c10::kLong));
  std::copy(slots.begin(), slots.end(), result.mutable_data_ptr<int64_t>());
  return result;
}

} // namespace torchkv
