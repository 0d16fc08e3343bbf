#include "host_memory.h"

#include <ATen/record_function.h>
#include <c10/core/Storage.h>

#include <map>
#include <memory>
#include <mutex>
#include <utility>
#include <vector>

#include "arguments.h"
#include "devices.h"
#include "memory.h"

namespace torchkv::mock_cuda {
namespace {

struct Used {
  c10::Storage storage; // kept, as the caching host allocator keeps it
  History history;
};

// By storage; work known to be done is dropped.
std::map<const c10::StorageImpl*, Used>& used() {
  static auto* used = new std::map<const c10::StorageImpl*, Used>();
  return *used;
}

std::map<const void*, size_t>& pinned() {
  static auto* pinned = new std::map<const void*, size_t>();
  return *pinned;
}

const c10::StorageImpl* storage_of(const at::Tensor& tensor) {
  return tensor.storage().unsafeGetStorageImpl();
}

void add(
    History& history,
    const at::Tensor& tensor,
    bool is_write,
    const WorkPtr& work,
    const Clock& clock) {
  for_each_run(tensor, [&](const char* begin, size_t num_bytes) {
    const auto address = reinterpret_cast<uintptr_t>(begin);
    history.access(address, address + num_bytes, is_write, work, clock);
  });
}

void drop_what_is_done() {
  for (auto it = used().begin(); it != used().end();) {
    const bool is_done = it->second.history.uncovered(host_clock()) == nullptr;
    it = is_done ? used().erase(it) : std::next(it);
  }
}

// Before each operator.
std::unique_ptr<at::ObserverContext> on_operator(
    const at::RecordFunction& function) {
  const std::lock_guard lock(mutex());
  drop_what_is_done();
  const auto schema = function.operator_schema();
  if (used().empty() || !schema) {
    return nullptr;
  }
  const std::vector<c10::IValue> inputs(
      function.inputs().begin(), function.inputs().end());
  if (device_of(inputs)) {
    return nullptr; // checked by the operator itself
  }
  const WorkPtr work = host_work(schema->name());
  for_each_tensor(*schema, inputs, [&](const at::Tensor& tensor, bool writes) {
    const auto it = used().find(storage_of(tensor));
    if (it == used().end()) {
      return;
    }
    try {
      add(it->second.history, tensor, writes, work, host_clock());
    } catch (const c10::Error& error) { // observers may not throw
      note_mistake(error.what_without_backtrace());
    }
  });
  return nullptr;
}

const at::CallbackHandle registered = at::addGlobalCallback(
    at::RecordFunctionCallback(&on_operator)
        .needsInputs(true)
        .scopes({at::RecordScope::FUNCTION}));

} // namespace

void access_host(
    const WorkPtr& work,
    c10::Stream stream,
    const at::Tensor& tensor,
    bool is_write) {
  Used& use = used().try_emplace(storage_of(tensor)).first->second;
  use.storage = tensor.storage();
  add(use.history, tensor, is_write, work, clock_of(stream));
}

bool pin_host_memory(const void* data, size_t num_bytes) {
  constexpr uintptr_t kPage = 4096;
  const auto pages_of = [](const void* begin, size_t size) {
    const auto first = reinterpret_cast<uintptr_t>(begin);
    return std::pair(first / kPage, (first + size - 1) / kPage);
  };
  const std::lock_guard lock(mutex());
  const auto wanted = pages_of(data, num_bytes);
  for (const auto& [begin, size] : pinned()) {
    const auto known = pages_of(begin, size);
    if (wanted.first <= known.second && known.first <= wanted.second) {
      return false;
    }
  }
  pinned().emplace(data, num_bytes);
  return true;
}

bool unpin_host_memory(const void* data) {
  const std::lock_guard lock(mutex());
  return pinned().erase(data) != 0;
}

std::map<const void*, size_t> pinned_host_memory() {
  const std::lock_guard lock(mutex());
  return pinned();
}

void forget_host_memory() {
  used().clear();
}

} // namespace torchkv::mock_cuda
