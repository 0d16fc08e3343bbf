#include "updater.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/alias.h>
#include <c10/core/InferenceMode.h>
#include <c10/core/StreamGuard.h>

#include <algorithm>
#include <unordered_map>
#include <utility>

#include "../core/errors.h"
#include "../core/in_progress.h"
#include "../core/plain_dispatch.h"
#include "../core/process.h"
#include "../core/sparse.h"
#include "../device/runtime.h"

namespace torchkv {
namespace {

using Turns =
    std::unordered_map<const void*, std::weak_ptr<OpaqueUpdater::Turn>>;

// Keyed by the updater's object. REQUIRES: process_mutex().
Turns& turns() {
  // Leaked: the last updater may outlive static destruction.
  static auto* value = new Turns();
  return *value;
}

// Shared by updaters of one object. Removed with its last user, because
// addresses are reused.
std::shared_ptr<OpaqueUpdater::Turn> turn_of(const void* object) {
  const auto forget = [object](const OpaqueUpdater::Turn* unused) {
    delete unused;
    const std::lock_guard lock(process_mutex());
    const auto it = turns().find(object);
    if (it != turns().end() && it->second.expired()) {
      turns().erase(it);
    }
  };
  const std::lock_guard lock(process_mutex());
  auto& shared = turns()[object];
  auto result = shared.lock();
  if (result == nullptr) {
    result =
        std::shared_ptr<OpaqueUpdater::Turn>(new OpaqueUpdater::Turn(), forget);
    shared = result;
  }
  return result;
}

void check_not_running(const char* op, const OpaqueUpdater& updater) {
  TORCH_CHECK(
      !InProgress<std::mutex>::contains(&updater.turn().mutex),
      op,
      ": unexpected recursion: the updater uses a store whose updater it is");
}

// Another tensor on the same memory. The updater gets such an alias, so that
// changes of the tensor object (resize_, `.data = `) do not affect the store.
at::Tensor alias_of(const at::Tensor& tensor) {
  const PlainDispatch plain;
  return at::alias(tensor);
}

at::Tensor handed_over(const at::Tensor& tensor) {
  return tensor.is_sparse() ? tensor : alias_of(tensor);
}

// What a tensor must keep.
struct Form {
  explicit Form(const at::Tensor& tensor)
      : sizes(tensor.sizes()), dtype(tensor.scalar_type()) {}

  bool is_of(const at::Tensor& sparse) const {
    return sparse.is_sparse() && sparse.sizes() == c10::IntArrayRef(sizes) &&
        sparse.scalar_type() == dtype && sparse.sparse_dim() == 1;
  }

  c10::SmallVector<int64_t, 4> sizes;
  c10::ScalarType dtype;
};

// Whether `handed` is still an alias of `stored` or, if it is sparse, of the
// form that it had.
bool is_intact(
    const at::Tensor& handed,
    const at::Tensor& stored,
    const Form& before) {
  if (stored.is_sparse()) {
    return before.is_of(handed);
  }
  return handed.has_storage() &&
      handed.storage().is_alias_of(stored.storage()) &&
      handed.storage_offset() == stored.storage_offset() &&
      handed.sizes() == stored.sizes() &&
      handed.strides() == stored.strides() &&
      handed.scalar_type() == stored.scalar_type() &&
      handed.is_neg() == stored.is_neg() &&
      handed.is_conj() == stored.is_conj();
}

// If the updater kept its arguments, later writes of either would be visible to
// the other. Gives the store its own memory then.
void separate(at::Tensor& stored, at::Tensor& input, bool is_shared) {
  if (!input.is_sparse() && input.storage().use_count() > 1) {
    input.reset(); // the next push makes a new one
  }
  if (!is_shared && !stored.is_sparse() && stored.storage().use_count() > 1) {
    const PlainDispatch plain;
    stored = stored.clone();
    forbid_resize(stored);
  }
}

// Makes the updater's own stream the current one.
class OnItsStream {
 public:
  OnItsStream(
      const OpaqueUpdater& updater,
      const at::Tensor& input,
      const at::Tensor& stored) {
    const c10::Device device = stored.device();
    if (device.is_cpu()) {
      return;
    }
    const c10::Stream current = runtime_.current_stream(device);
    if (runtime_.is_capturing(current)) {
      return; // all that is captured is on this stream
    }
    auto& streams = updater.turn().streams;
    const auto own =
        std::find_if(streams.begin(), streams.end(), [&](c10::Stream stream) {
          return stream.device() == device;
        });
    if (own == streams.end()) {
      streams.push_back(current);
      return;
    }
    if (*own == current) {
      return;
    }
    auto event = runtime_.make_event(device);
    runtime_.record(*event, current);
    runtime_.wait(*event, *own);
    for (const auto& tensor : {input, stored}) {
      if (tensor.is_sparse()) {
        runtime_.keep_until_done(sparse_impl(tensor).indices(), *own);
        runtime_.keep_until_done(sparse_impl(tensor).values(), *own);
      } else {
        runtime_.keep_until_done(tensor, *own);
      }
    }
    guard_.reset_stream(*own);
    switched_ = Switched{*own, current, std::move(event)};
  }
  ~OnItsStream() {
    if (!switched_) {
      return;
    }
    try {
      runtime_.record(*switched_->event, switched_->own);
      runtime_.wait(*switched_->event, switched_->before);
    } catch (const c10::Error&) { // NOLINT(bugprone-empty-catch)
      // As in StreamOrder.
    }
  }
  C10_DISABLE_COPY_AND_ASSIGN(OnItsStream);

 private:
  struct Switched {
    c10::Stream own;
    c10::Stream before;
    std::unique_ptr<RuntimeEvent> event;
  };

  Runtime& runtime_ = default_runtime();
  std::optional<Switched> switched_;
  c10::OptionalStreamGuard guard_;
};

} // namespace

OpaqueUpdater::OpaqueUpdater(const void* object, bool takes_rows)
    : turn_(turn_of(object)), takes_rows_(takes_rows) {}

std::string expected_signature(KeyKind kind) {
  return c10::str(
      "forward(key: ", name(kind), ", input: Tensor, stored: Tensor)");
}

void check_key_kind(const char* op, const Updater& updater, KeyKind kind) {
  const auto* opaque = std::get_if<std::shared_ptr<OpaqueUpdater>>(&updater);
  if (opaque == nullptr) {
    return;
  }
  const auto expected = (*opaque)->key_kind();
  TORCH_CHECK_TYPE(
      !expected || *expected == kind,
      op,
      ": expected an updater of signature ",
      expected_signature(kind),
      ", as this store has ",
      name(kind),
      " keys, but got one that takes ",
      name(*expected),
      " keys");
}

void apply_updater(
    OpaqueUpdater& updater,
    const Key& key,
    at::Tensor& input,
    at::Tensor& stored,
    bool is_shared) {
  const c10::InferenceMode normal_tensors(false);
  const at::NoGradGuard no_grad;
  check_not_running("push", updater);
  const std::lock_guard lock(updater.turn().mutex);
  const InProgress running(&updater.turn().mutex);
  bool written_in_place = false;
  try {
    const OnItsStream on_its_stream(updater, input, stored);
    const at::Tensor handed_input = handed_over(input);
    const at::Tensor handed = handed_over(stored);
    const Form before(stored);
    updater.update(key, handed_input, handed);
    written_in_place = is_intact(handed, stored, before);
  } catch (...) {
    separate(stored, input, is_shared);
    throw;
  }
  separate(stored, input, is_shared);
  TORCH_CHECK(
      written_in_place,
      "push: expected the updater to write the stored value in place, but it "
      "replaced the tensor's memory, shape, strides or dtype ",
      key.context());
}

Returned what_is(const at::Tensor& returned, const at::Tensor& stored) {
  if (stored.is_sparse()) {
    const bool is_stored = returned.is_same(stored) ||
        (returned.has_storage() &&
         returned.storage().is_alias_of(
             sparse_impl(stored).values().storage()));
    return is_stored ? Returned::kStored : Returned::kNewTensor;
  }
  return returned.has_storage() &&
          returned.storage().is_alias_of(stored.storage())
      ? Returned::kStored
      : Returned::kNewTensor;
}

Returned what_is(uintptr_t address, const at::Tensor& stored) {
  const c10::Storage& storage =
      (stored.is_sparse() ? sparse_impl(stored).values() : stored).storage();
  const auto begin = reinterpret_cast<uintptr_t>(storage.data());
  return address >= begin && address < begin + storage.nbytes()
      ? Returned::kStored
      : Returned::kNewTensor;
}

void check_returned(
    const Key& key,
    Returned returned,
    const at::Tensor& stored) {
  // What was passed to the updater has version 0. Writes through .data or numpy
  // do not change it.
  TORCH_CHECK_TYPE(
      returned != Returned::kNewTensor || stored._version() != 0,
      "push: expected the updater to write the stored value in place, but it "
      "returned a new tensor and left the stored value unchanged; write "
      "stored.copy_(result) and return None ",
      key.context());
}

at::Tensor serialize_updater(OpaqueUpdater& updater) {
  check_not_running("save", updater);
  const std::lock_guard lock(updater.turn().mutex);
  const InProgress running(&updater.turn().mutex);
  return updater.serialize();
}

} // namespace torchkv
