#include "caller_values.h"

#include <ATen/ops/from_blob.h>

#include <mutex>
#include <unordered_map>
#include <utility>

#include "../core/plain_dispatch.h"

namespace torchkv::dist {

struct CallersRegistry {
  std::shared_mutex reading; // shared by updates; guards CallerValue::copy
  std::mutex mutex; // guards the rest; taken last
  std::unordered_map<const void*, CallerValue*> values;

  // A caller's value that is pushed. REQUIRES: the mutex.
  CallerValue* value_in(const Push& push) const {
    const auto found = push.pieces.empty()
        ? values.end()
        : values.find(push.pieces[0].owner().get());
    return found == values.end() ? nullptr : found->second;
  }
};

// The owner of the blobs that refer to a caller's value.
struct CallerValue {
  CallerValue(
      std::shared_ptr<CallersRegistry> of,
      at::Tensor tensor,
      at::Tensor written)
      : registry(std::move(of)),
        begin(static_cast<const std::byte*>(tensor.const_data_ptr())),
        value(std::move(tensor)),
        out(std::move(written)) {
    const std::lock_guard lock(registry->mutex);
    registry->values.emplace(this, this);
  }
  ~CallerValue() {
    const std::lock_guard lock(registry->mutex);
    registry->values.erase(this);
  }
  C10_DISABLE_COPY_AND_ASSIGN(CallerValue);

  // The same bytes of the copy.
  Blob in_copy(const Blob& blob) const {
    const auto offset = static_cast<size_t>(blob.data() - begin);
    return blob_of(copy).slice(offset, blob.size());
  }

  const std::shared_ptr<CallersRegistry> registry;
  const std::byte* const begin;
  // Keeps the memory. Freed by the caller: the node's thread, which may be the
  // last to have a blob, must not wait for Python.
  at::Tensor value;
  at::Tensor out; // undefined: none, or the caller has returned
  Blobs in_out; // the slices' values that have been written into it
  at::Tensor copy; // undefined while the caller waits
};

CallerValues::CallerValues() : registry_(std::make_shared<CallersRegistry>()) {}

CallerValues::OfCall::OfCall(const CallerValues& values, Buffers buffers)
    : registry_(values.registry_), buffers_(std::move(buffers)) {}

// Terminates the process if there is no memory for the copies: the server could
// only go on with other values.
CallerValues::OfCall::~OfCall() {
  std::vector<at::Tensor> copies(values_.size());
  kernels::cpu::CopyBatch batch;
  for (size_t i = 0; i < values_.size() && !are_merged_; ++i) {
    const at::Tensor& value = values_[i]->value;
    if (values_[i].use_count() > 1) { // or nobody can ask for it
      copies[i] = buffers_.empty(value.sizes(), value.scalar_type());
      batch.add(
          value.const_data_ptr(), value.nbytes(), copies[i].mutable_data_ptr());
    }
  }
  batch.run(); // without the lock, for which the node's thread may wait
  const std::lock_guard lock(registry_->reading);
  for (size_t i = 0; i < values_.size(); ++i) {
    values_[i]->copy = std::move(copies[i]);
    values_[i]->value.reset();
    values_[i]->out.reset();
    // Or the next update would not write the value in place.
    values_[i]->in_out.clear();
  }
}

Blob CallerValues::OfCall::add(const at::Tensor& value, const at::Tensor& out) {
  auto added = std::make_shared<CallerValue>(registry_, value, out);
  values_.push_back(added);
  return {std::move(added), value.const_data_ptr(), value.nbytes()};
}

std::unordered_set<const void*> CallerValues::OfCall::in_outs() const {
  std::unordered_set<const void*> owners;
  for (const auto& value : values_) {
    for (const auto& slice : value->in_out) {
      owners.insert(slice.owner().get());
    }
  }
  return owners;
}

CallerValues::Lock CallerValues::hold(c10::ArrayRef<RoundPtr> rounds) const {
  {
    const std::lock_guard lock(registry_->mutex);
    if (registry_->values.empty()) {
      return {};
    }
  }
  Lock reading(registry_->reading);
  std::vector<Blob> replaced; // freed without the mutex, which owners take
  const std::lock_guard lock(registry_->mutex);
  for (const auto& round : rounds) {
    for (auto& push : round->pushes) {
      for (auto& piece : push.pieces) {
        const auto found = registry_->values.find(piece.owner().get());
        if (found != registry_->values.end() && found->second->copy.defined()) {
          replaced.push_back(
              std::exchange(piece, found->second->in_copy(piece)));
        }
      }
    }
  }
  return reading;
}

at::Tensor CallerValues::out_of(
    const Round& round,
    c10::IntArrayRef sizes,
    c10::ScalarType dtype) const {
  const std::lock_guard lock(registry_->mutex);
  for (const auto& push : round.pushes) {
    const CallerValue* const own = registry_->value_in(push);
    if (own != nullptr && own->out.defined()) {
      const auto offset = push.pieces[0].data() - own->begin;
      const PlainDispatch plain;
      return at::from_blob(
          static_cast<std::byte*>(own->out.mutable_data_ptr()) + offset,
          sizes,
          at::TensorOptions(dtype));
    }
  }
  return {};
}

void CallerValues::set_written(const Round& round, const Blob& result) const {
  const std::lock_guard lock(registry_->mutex);
  for (const auto& push : round.pushes) {
    CallerValue* const own = registry_->value_in(push);
    if (own != nullptr && own->out.defined()) {
      own->in_out.push_back(result);
      return;
    }
  }
}

} // namespace torchkv::dist
