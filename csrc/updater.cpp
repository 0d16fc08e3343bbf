#include "updater.h"

#include <ATen/core/grad_mode.h>
#include <c10/core/InferenceMode.h>

#include <iterator>
#include <unordered_map>

#include "errors.h"
#include "in_progress.h"
#include "script_updater.h"

namespace torchkv {
namespace {

// The mutex of an object that runs. Dead ones are dropped when others are asked
// for; an address that comes back has a new object and gets a new mutex.
std::shared_ptr<std::mutex> mutex_of(const void* object) {
  static std::mutex guard;
  static std::unordered_map<const void*, std::weak_ptr<std::mutex>> mutexes;
  const std::lock_guard lock(guard);
  for (auto it = mutexes.begin(); it != mutexes.end();) {
    it = it->second.expired() ? mutexes.erase(it) : std::next(it);
  }
  auto result = mutexes[object].lock();
  if (result == nullptr) {
    result = std::make_shared<std::mutex>();
    mutexes[object] = result;
  }
  return result;
}

// Another tensor on the same memory. The updater gets such an alias, so that
// what it does to the tensor object (resize_, `.data = `) stays with it.
at::Tensor alias_of(const at::Tensor& tensor) {
  return tensor.detach();
}

// The updater kept what it was handed: a later push would change it behind the
// updater's back, or the updater the stored value. Give the store its own.
void separate(at::Tensor& stored, at::Tensor& input) {
  if (input.storage().use_count() > 1) {
    input.reset(); // the next push makes a new one
  }
  if (stored.storage().use_count() > 1) {
    stored = stored.clone();
  }
}

} // namespace

OpaqueUpdater::OpaqueUpdater(const void* object) : mutex_(mutex_of(object)) {}

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
      ScriptUpdater::expected_signature(kind),
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
    at::Tensor& stored) {
  const c10::InferenceMode normal_tensors(false);
  const at::NoGradGuard no_grad;
  TORCH_CHECK(
      !InProgress<std::mutex>::contains(&updater.mutex()),
      "push: expected an updater that does not run yet, but got one that pushes "
      "to another store whose updater it is, too ",
      key.context());
  const std::lock_guard lock(updater.mutex());
  const InProgress running(&updater.mutex());
  bool written_in_place = false;
  try {
    const at::Tensor handed_input = alias_of(input);
    const at::Tensor handed = alias_of(stored);
    updater.update(key, handed_input, handed);
    written_in_place = handed.has_storage() &&
        handed.storage().is_alias_of(stored.storage()) &&
        handed.sizes() == stored.sizes() &&
        handed.scalar_type() == stored.scalar_type();
  } catch (...) {
    separate(stored, input);
    throw;
  }
  separate(stored, input);
  TORCH_CHECK(
      written_in_place,
      "push: expected the updater to write the stored value in place, but got "
      "a tensor whose memory, shape or dtype it had replaced ",
      key.context());
}

std::shared_ptr<OpaqueUpdater> load_updater(const at::Tensor& bytes) {
  return ScriptUpdater::load(bytes);
}

} // namespace torchkv
