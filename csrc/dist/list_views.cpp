#include "list_views.h"

#include <c10/core/CPUAllocator.h>
#include <c10/core/TensorImpl.h>

#include <memory>
#include <utility>

namespace torchkv::dist {

ListViews::ListViews(
    const std::vector<RoundPart>& parts,
    const std::vector<c10::ScalarType>& dtypes)
    : dtypes_(dtypes) {
  const int64_t num_elements = parts.back().begin + parts.back().num_elements;
  for (const auto dtype : dtypes) {
    storages_.emplace_back(
        c10::make_intrusive<c10::StorageImpl>(
            c10::StorageImpl::use_byte_size_t(),
            static_cast<size_t>(num_elements) * c10::elementSize(dtype),
            c10::DataPtr(nullptr, c10::Device(c10::kCPU)),
            /*allocator=*/nullptr,
            /*resizable=*/false));
  }
  for (const auto& part : parts) {
    for (size_t memory = 0; memory < dtypes.size(); ++memory) {
      auto view = at::detail::make_tensor<c10::TensorImpl>(
          c10::Storage(storages_[memory]),
          c10::DispatchKeySet(c10::DispatchKey::CPU),
          c10::scalarTypeToTypeMeta(dtypes[memory]));
      auto* const impl = view.unsafeGetTensorImpl();
      impl->set_sizes_contiguous(part.spec->sizes);
      impl->set_storage_offset(part.begin);
      tensors_.append(view);
    }
    tensors_.end_group();
  }
}

void ListViews::set(size_t memory, const Blob& values) {
  auto owner = std::make_unique<Blob>(values);
  storages_[memory].set_data_ptr_noswap(
      c10::DataPtr(
          const_cast<std::byte*>(values.data()),
          owner.release(),
          [](void* held) { delete static_cast<Blob*>(held); },
          c10::Device(c10::kCPU)));
}

void ListViews::set(size_t memory, void* values) {
  storages_[memory].set_data_ptr_noswap(
      c10::DataPtr(values, c10::Device(c10::kCPU)));
}

void ListViews::clear() {
  for (const auto& storage : storages_) {
    storage.set_data_ptr_noswap(c10::DataPtr(nullptr, c10::Device(c10::kCPU)));
  }
}

} // namespace torchkv::dist
