#include "row_values.h"

#include <ATen/ExpandUtils.h>
#include <ATen/ops/_sparse_coo_tensor_with_dims_and_tensors.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/empty.h>

#include <algorithm>
#include <map>
#include <memory>
#include <numeric>
#include <optional>
#include <unordered_map>
#include <utility>
#include <vector>

#include "../core/errors.h"
#include "../core/plain_dispatch.h"
#include "../core/row_sparse.h"
#include "../core/sparse.h"
#include "../kernels/cpu/row_ids.h"
#include "../kernels/cuda/library.h"
#include "../memory/layout.h"
#include "../memory/merged_ids.h"
#include "../memory/row_ids.h"
#include "check.h"

namespace torchkv {
namespace {

at::Tensor empty_ids(int64_t count) {
  return at::empty({count}, at::TensorOptions().dtype(c10::kLong));
}

// A plain, contiguous tensor that is not the stored value itself: rows are read
// in another order than they are written. For a row-sparse key, in CPU memory.
at::Tensor plain_rows(const at::Tensor& rows, Entry& entry) {
  bool is_stored = false;
  if (entry.rows == nullptr) {
    const std::lock_guard lock(entry.mutex);
    is_stored = entry.is_shared && rows.is_alias_of(entry.slices[0].value);
  }
  const c10::Device device =
      entry.rows == nullptr ? rows.device() : c10::Device(c10::kCPU);
  if (!is_stored && rows.is_contiguous() && is_plain(rows) &&
      rows.device() == device) {
    return rows;
  }
  const PlainDispatch plain;
  return at::empty(rows.sizes(), rows.options().device(device)).copy_(rows);
}

void check_ids(
    const Where& where,
    const at::Tensor& ids,
    int64_t first_bad,
    int64_t num_rows) {
  TORCH_CHECK_INDEX(
      first_bad < 0,
      where.op,
      ": expected row ids from 0 to ",
      num_rows - 1,
      ", but got ",
      ids.const_data_ptr<int64_t>()[first_bad],
      " at index ",
      first_bad,
      " ",
      where.key.context());
}

// Checks and merges ids on devices, those of all keys together: how often the
// host waits does not depend on how many there are.
class IdsOnDevices {
 public:
  // REQUIRES: at least one id; values of a key all on one device.
  void add(
      const Where& where,
      int64_t num_rows,
      std::shared_ptr<RowSparse> rows) {
    auto& keys = keys_[rows->ids_on_device.device().index()];
    const auto [found, is_new] =
        keys.numbers.try_emplace(&where.key, keys.all.size());
    if (is_new) {
      keys.all.push_back({where, num_rows, {}});
    }
    keys.all[found->second].values.push_back(std::move(rows));
  }

  void merge() const {
    const PlainDispatch plain;
    for (const auto& [device, keys] : keys_) {
      if (!merge(keys.all)) {
        for (const auto& key : keys.all) {
          key.bring();
        }
      }
    }
  }

 private:
  struct OfKey {
    Where where;
    int64_t num_rows;
    std::vector<std::shared_ptr<RowSparse>> values;

    // Checks them on the host.
    void bring() const {
      for (const auto& value : values) {
        const at::Tensor ids = value->ids_on_device.to(c10::kCPU);
        const auto found = kernels::cpu::inspect_row_ids(
            ids.const_data_ptr<int64_t>(), ids.numel(), num_rows);
        check_ids(where, ids, found.first_bad, num_rows);
        set_ids(*value, ids, num_rows, found);
      }
    }
  };
  struct OfDevice {
    std::vector<OfKey> all;
    std::unordered_map<const Key*, size_t> numbers;
  };

  // False if an id is out of range, or if there are too many.
  static bool merge(const std::vector<OfKey>& keys) {
    int64_t num_ids = 0;
    int64_t num_rows = 0;
    std::vector<IdsOfKey> given;
    for (const auto& key : keys) {
      auto& ids = given.emplace_back();
      ids.num_rows = key.num_rows;
      for (const auto& value : key.values) {
        num_ids += value->ids_on_device.numel();
        ids.values.push_back(value->ids_on_device);
      }
      if (num_ids > kMaxMergedIds || key.num_rows > kMaxMergedRows - num_rows) {
        return false;
      }
      num_rows += key.num_rows;
    }
    const auto merged = merge_ids(given);
    for (size_t i = 0; i < merged.size(); ++i) {
      const auto of_key = std::make_shared<const MergedIds>(merged[i]);
      int64_t first = 0;
      for (const auto& value : keys[i].values) {
        value->merged = of_key;
        value->first_merged = first;
        first += value->ids_on_device.numel();
      }
    }
    return !merged.empty();
  }

  std::map<c10::DeviceIndex, OfDevice> keys_; // by CUDA device
};

// Replaces a sparse tensor by its rows. Ids on `device`, where kernels can
// merge the rows, stay there and are not checked yet.
std::shared_ptr<const Encoding> encode_rows(
    const Where& where,
    Entry& entry,
    at::Tensor& tensor,
    Runtime& runtime,
    std::optional<c10::Device> device,
    IdsOnDevices& unchecked) {
  const at::SparseTensorImpl& impl = sparse_impl(tensor);
  check_rows_shape(where, entry.meta, impl.sizes());
  check_rows(where, tensor);
  const at::Tensor indices = impl.indices();
  const int64_t count = indices.numel();
  const int64_t num_rows = entry.meta.sizes[0];
  check_storable(where, impl.values());
  check_not_capturing(where, runtime, tensor.device(), "sparse");
  at::Tensor rows = plain_rows(impl.values(), entry);
  TORCHKV_CHECK_VALUE(
      rows.dim() == tensor.dim() && rows.size(0) == count &&
          rows.sizes().slice(1) == impl.sizes().slice(1),
      where,
      "expected a row of each id, but got ",
      count,
      " ids and rows of shape ",
      rows.sizes());

  const PlainDispatch plain;
  auto encoding = std::make_shared<RowSparse>();
  encoding->sizes = entry.meta.sizes;
  encoding->dtype = rows.scalar_type();
  if (device == indices.device() && count != 0) {
    encoding->ids_on_device = indices[0].contiguous();
    unchecked.add(where, num_rows, encoding);
    tensor = std::move(rows);
    return encoding;
  }
  const at::Tensor ids = indices[0].to(c10::kCPU).contiguous();
  const auto found = kernels::cpu::inspect_row_ids(
      ids.const_data_ptr<int64_t>(), count, num_rows);
  check_ids(where, ids, found.first_bad, num_rows);
  if (entry.rows == nullptr || entry.slices.empty()) { // or of servers
    set_ids(*encoding, ids, num_rows, found);
  } else {
    encoding->ids = ids; // Batch::find_rows sorts their slots
  }
  tensor = std::move(rows);
  return encoding;
}

// Replaces a dense tensor, pushed to a row-sparse key, by all its rows.
std::shared_ptr<const Encoding> encode_all_rows(
    const Where& where,
    Entry& entry,
    at::Tensor& tensor,
    Runtime& runtime) {
  check_storable(where, tensor);
  check_not_capturing(
      where, runtime, tensor.device(), "those of a row-sparse key");
  check_shape(where, entry.meta, tensor.sizes());
  const PlainDispatch plain;
  auto encoding = std::make_shared<RowSparse>();
  encoding->sizes = entry.meta.sizes;
  encoding->dtype = tensor.scalar_type();
  encoding->ids = empty_ids(tensor.size(0));
  auto* const ids = encoding->ids.mutable_data_ptr<int64_t>();
  std::iota(ids, ids + tensor.size(0), int64_t{0});
  encoding->is_distinct = true;
  tensor = plain_rows(tensor, entry);
  return encoding;
}

// Returns the device where kernels can merge rows, if the value is whole on
// one.
std::optional<c10::Device> check_takes_rows(
    const Where& where,
    Entry& entry,
    Runtime& runtime) {
  const std::lock_guard lock(entry.mutex);
  if (entry.slices.empty()) {
    return std::nullopt; // servers have the value
  }
  check_not_capturing(where, runtime, entry, "sparse");
  TORCHKV_CHECK_NOT_IMPLEMENTED(
      entry.rows != nullptr || is_contiguous(entry),
      where,
      "expected a contiguous stored value, as a value pushed to the key is "
      "sparse, but got one of strides ",
      c10::IntArrayRef(entry.strides));
  const c10::Device home = entry.slices[0].home.device;
  const bool merges = entry.rows == nullptr && entry.slices.size() == 1 &&
      home.is_cuda() && kernels::cuda::has_kernels(home);
  return merges ? std::optional(home) : std::nullopt;
}

} // namespace

// Wrappers, which have no rows of their own, are left to check_values.
bool is_sparse_coo(const at::Tensor& tensor) {
  return tensor.is_sparse() &&
      !tensor.unsafeGetTensorImpl()->is_python_dispatch() &&
      !tensor.key_set().has(c10::DispatchKey::Functionalize);
}

at::Tensor make_sparse(
    const at::Tensor& ids,
    const at::Tensor& rows,
    c10::IntArrayRef sizes) {
  const PlainDispatch plain;
  return at::_sparse_coo_tensor_with_dims_and_tensors(
      /*sparse_dim=*/1,
      rows.dim() - 1,
      sizes,
      ids.unsqueeze(0),
      rows,
      rows.options().layout(c10::kSparse),
      /*is_coalesced=*/true);
}

at::Tensor sparse_of_rows(
    const at::Tensor& ids,
    const at::Tensor& rows,
    const Meta& meta) {
  c10::SmallVector<int64_t, 4> sizes(meta.sizes);
  if (meta.has_unlimited_rows) {
    const auto* const all = ids.const_data_ptr<int64_t>();
    sizes[0] = ids.numel() == 0 ? 0 : all[ids.numel() - 1] + 1;
  }
  return make_sparse(ids, rows, sizes);
}

void note_written(const at::Tensor& out) {
  if (!out.is_inference()) {
    out.unsafeGetTensorImpl()->bump_version();
  }
}

at::Tensor sparse_of_all_rows(const at::Tensor& value) {
  const PlainDispatch plain;
  return make_sparse(
      at::arange(value.size(0), value.options().dtype(c10::kLong)),
      value,
      value.sizes());
}

std::optional<DenseOuts> dense_outs(const Call& pull) {
  const Tensors& outs = *pull.outs;
  if (std::none_of(outs.flat.begin(), outs.flat.end(), is_sparse_coo)) {
    return std::nullopt;
  }
  check_count(pull.op, pull.keys, outs);
  DenseOuts dense;
  for (int64_t i = 0; i < pull.keys.size(); ++i) {
    const auto num_before = dense.outs.flat.size();
    for (const auto& out : outs.of(i)) {
      if (!is_sparse_coo(out)) {
        dense.outs.append(out);
      }
    }
    if (dense.outs.flat.size() != num_before) {
      dense.keys.list.push_back(pull.keys.list[i]);
      dense.outs.end_group();
    }
  }
  dense.keys.single = dense.keys.size() == 1;
  return dense;
}

void check_rows(const Where& where, const at::Tensor& sparse) {
  TORCHKV_CHECK_VALUE(
      sparse.sparse_dim() == 1,
      where,
      "expected a sparse tensor with one sparse dimension, as "
      "nn.Embedding(sparse=True) gives, but got one with ",
      sparse.sparse_dim(),
      "; see sparse_dim of torch.Tensor.to_sparse");
}

std::optional<Tensors> with_rows(
    const Call& call,
    const Entries& entries,
    Runtime& runtime) {
  const Tensors& given = *call.values;
  const bool has_row_sparse_key =
      std::any_of(entries.begin(), entries.end(), [](const auto& entry) {
        return entry->rows != nullptr;
      });
  if (!has_row_sparse_key &&
      std::none_of(given.flat.begin(), given.flat.end(), is_sparse_coo)) {
    return std::nullopt;
  }
  check_count(call.op, call.keys, given);
  Tensors values = given;
  values.encodings.resize(values.flat.size());
  IdsOnDevices unchecked;
  for (size_t i = 0; i < entries.size(); ++i) {
    const auto number = static_cast<int64_t>(i);
    const auto of_key = given.of(number);
    Entry& entry = *entries[i];
    if (entry.rows == nullptr &&
        std::none_of(of_key.begin(), of_key.end(), is_sparse_coo)) {
      continue;
    }
    const Where where{call.op, entry.key};
    const auto device = check_takes_rows(where, entry, runtime);
    for (int64_t j = given.begin(number); j < given.ends[i]; ++j) {
      at::Tensor& tensor = values.flat[j];
      auto& encoding = values.encodings[static_cast<size_t>(j)];
      if (encoding != nullptr) {
        const auto* const rows = dynamic_cast<const RowSparse*>(encoding.get());
        TORCHKV_CHECK_NOT_IMPLEMENTED(
            entry.rows == nullptr ||
                (rows != nullptr && rows->ids.defined() &&
                 !rows->order.defined()),
            where,
            "expected a tensor, or rows in the order of their ids, for a "
            "row-sparse key, but got a value of form '",
            encoding->form,
            "'");
      } else if (is_sparse_coo(tensor)) {
        encoding =
            encode_rows(where, entry, tensor, runtime, device, unchecked);
      } else if (entry.rows != nullptr) {
        encoding = encode_all_rows(where, entry, tensor, runtime);
      }
    }
  }
  unchecked.merge();
  return values;
}

std::vector<at::Tensor> merged_tensors(const Tensors& values) {
  std::vector<at::Tensor> result;
  for (const auto& encoding : values.encodings) {
    const auto* const rows = dynamic_cast<const RowSparse*>(encoding.get());
    if (rows != nullptr && rows->merged != nullptr && rows->first_merged == 0) {
      const MergedIds& merged = *rows->merged;
      result.insert(result.end(), {merged.ids, merged.offsets, merged.order});
    }
  }
  return result;
}

} // namespace torchkv
