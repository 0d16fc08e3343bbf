#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Stream.h>
#include <c10/macros/Macros.h>

#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <variant>
#include <vector>

#include "../core/export.h"
#include "../core/key.h"
#include "optimizer.h"

namespace torchkv {

// An updater that is opaque to the store: a TorchScript module or a Python
// callable. It gets the sum and the whole stored value of a key, one call per
// key, in the order pushed.
class TORCHKV_API OpaqueUpdater {
 public:
  explicit OpaqueUpdater(bool takes_rows = false)
      : OpaqueUpdater(this, takes_rows) {}
  // `object` identifies the code that runs. Updaters of one object, set on
  // several stores, share a mutex. REQUIRES: the object lives as long as this
  // updater.
  explicit OpaqueUpdater(const void* object, bool takes_rows = false);
  virtual ~OpaqueUpdater() = default;
  C10_DISABLE_COPY_AND_ASSIGN(OpaqueUpdater);

  // Whether it takes sums of rows as they are. Otherwise a dense key's are made
  // dense, and a row-sparse key refuses it.
  bool takes_rows() const {
    return takes_rows_;
  }

  // Merges `input`, the sum, into `stored`, in place. Both have the stored
  // dtype and shape, are on the current device and valid during the call. If it
  // takes rows, and all values are sparse or the key is row-sparse, `input` is
  // a coalesced torch.sparse_coo tensor with one sparse dimension; `stored` of
  // a row-sparse key is one, too, of the same rows, and may get others.
  // Exceptions reach the caller of push unchanged. An implementation that gets
  // a tensor back from the user's code passes it to check_returned. REQUIRES:
  // the mutex is held, no GIL; run through apply_updater.
  virtual void update(
      const Key& key,
      const at::Tensor& input,
      const at::Tensor& stored) = 0;

  // The kind of keys it takes; nothing = both.
  virtual std::optional<KeyKind> key_kind() const = 0;

  // Itself and its state as uint8 bytes, from which ScriptUpdater::load makes a
  // copy. Throws where it cannot be copied (a Python callable). REQUIRES: the
  // mutex is held; run through serialize_updater.
  virtual at::Tensor serialize() const = 0;

  // What updaters of one object share.
  struct Turn {
    std::mutex mutex; // serializes calls; acquired after an entry's mutex
    // The stream on which it runs on each accelerator: that of its first call,
    // so that tensors that it keeps are ordered and freed there. REQUIRES: the
    // mutex.
    std::vector<c10::Stream> streams;
  };
  Turn& turn() const {
    return *turn_;
  }

 private:
  const std::shared_ptr<Turn> turn_;
  const bool takes_rows_;
};

// How a sum becomes the stored value: it replaces it (ASSIGN), or an optimizer
// or an opaque updater merges it in.
using Updater =
    std::variant<std::monostate, OptimizerPtr, std::shared_ptr<OpaqueUpdater>>;

// Whether it can be applied to shards of a sum and of the stored value.
inline bool is_elementwise(const Updater& updater) {
  const auto* optimizer = std::get_if<OptimizerPtr>(&updater);
  return std::holds_alternative<std::monostate>(updater) ||
      (optimizer != nullptr && (*optimizer)->is_elementwise());
}

// "forward(key: int, input: Tensor, stored: Tensor)", for messages.
std::string expected_signature(KeyKind kind);

// Throws TypeError where `updater` cannot take keys of `kind`.
void check_key_kind(const char* op, const Updater& updater, KeyKind kind);

// Runs an opaque updater on one key: takes its mutex, sets its guards (no
// gradient graph, no inference mode), and afterwards restores what the updater
// must not have changed, also when it throws: `stored` and `input` alias
// nothing that it may have kept, except a `stored` that is shared with the
// caller. `input` may be left undefined by this. On an accelerator it runs on
// its own stream, ordered with the current one. Sparse tensors are handed over
// themselves: they are copies.
void apply_updater(
    OpaqueUpdater& updater,
    const Key& key,
    at::Tensor& input,
    at::Tensor& stored,
    bool is_shared);

// What an updater has returned, at any depth; the largest value wins.
enum class Returned : uint8_t { kNoTensor, kNewTensor, kStored };

// Classifies a returned tensor, or an array whose first element is at
// `address`. The updater was given `stored`.
TORCHKV_API Returned
what_is(const at::Tensor& returned, const at::Tensor& stored);
TORCHKV_API Returned what_is(uintptr_t address, const at::Tensor& stored);

// Throws TypeError where an updater has returned a new tensor and left
// `stored`, the tensor that it was given, unwritten.
TORCHKV_API void check_returned(
    const Key& key,
    Returned returned,
    const at::Tensor& stored);

// serialize() under the updater's mutex. RuntimeError, instead of a deadlock,
// if this thread is running the same object.
at::Tensor serialize_updater(OpaqueUpdater& updater);

} // namespace torchkv
