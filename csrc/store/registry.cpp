#include "registry.h"

#include <c10/util/Exception.h>

#include <algorithm>
#include <cctype>
#include <map>
#include <mutex>
#include <utility>
#include <vector>

#include "../core/text.h"
#include "local_store.h"

namespace torchkv {
namespace {

using Policy = Placement::Policy;

void check_no_options(const char* type, const StoreOptions& options) {
  TORCH_CHECK_VALUE(
      options.is_default(),
      "create: unexpected options for a store of type '",
      type,
      "'; they are for stores on several machines");
}

std::unique_ptr<Store> make_local(
    Runtime& runtime,
    const StoreOptions& options) {
  check_no_options("local", options);
  return std::make_unique<LocalStore>(runtime, LocalStore::Options());
}

std::unique_ptr<Store> make_device(
    Runtime& runtime,
    const StoreOptions& options) {
  check_no_options("device", options);
  LocalStore::Options store;
  store.policy = Policy::kShardAll;
  store.places = Places::environment();
  return std::make_unique<LocalStore>(runtime, std::move(store));
}

// NCCL takes each device once, so several places cannot share one.
std::unique_ptr<Store> make_nccl(
    Runtime& runtime,
    const StoreOptions& options) {
  check_no_options("nccl", options);
  LocalStore::Options store;
  store.policy = Policy::kShardEach;
  store.nccl = true;
  return std::make_unique<LocalStore>(runtime, std::move(store));
}

struct Registry {
  std::mutex mutex; // guards the rest
  std::map<std::string, MakeStore> types{
      {"local", make_local},
      {"device", make_device},
      {"nccl", make_nccl}};
  // In the order of messages: empty for a type, else the target of an alias.
  std::vector<std::pair<std::string, std::string>> names{
      {"local", ""},
      {"device", ""},
      {"nccl", ""},
      {"dist_sync", ""},
      {"dist_async", ""},
      {"dist_device_sync", ""},
      {"dist", "dist_sync"},
      {"local_update_cpu", "local"},
      {"local_allreduce_cpu", "local"},
      {"local_allreduce_device", "device"}};

  static Registry& get() {
    static auto* registry =
        new Registry(); // leaked: used until the process ends
    return *registry;
  }
};

} // namespace

void register_store(const std::string& type, MakeStore make) {
  TORCH_CHECK_VALUE(
      !type.empty() && make != nullptr,
      "register_store: expected a name and a function, but got ",
      type.empty() ? "an empty name" : "an empty function");
  Registry& registry = Registry::get();
  const std::lock_guard lock(registry.mutex);
  const auto is_alias = [&](const auto& known) {
    return known.first == type && !known.second.empty();
  };
  TORCH_CHECK_VALUE(
      registry.types.count(type) == 0 &&
          std::none_of(registry.names.begin(), registry.names.end(), is_alias),
      "register_store: expected a new name, but there is a store type ",
      quoted(type));
  registry.types.emplace(type, std::move(make));
}

MakeStore replace_store(const std::string& type, MakeStore make) {
  Registry& registry = Registry::get();
  const std::lock_guard lock(registry.mutex);
  std::swap(registry.types[type], make);
  if (registry.types[type] == nullptr) {
    registry.types.erase(type);
  }
  return make;
}

std::string canonical_type(const std::string& text) {
  Registry& registry = Registry::get();
  const std::lock_guard lock(registry.mutex);
  std::vector<std::string> names; // of what can be created
  std::string type = registry.types.count(text) != 0 ? text : "";
  for (const auto& [name, alias] : registry.names) {
    const std::string& target = alias.empty() ? name : alias;
    if (registry.types.count(target) != 0) {
      names.push_back(name);
    }
    if (name == text) {
      type = target;
    }
  }
  for (const auto& [name, make] : registry.types) {
    if (std::find(names.begin(), names.end(), name) == names.end()) {
      names.push_back(name);
    }
  }
  if (type.empty()) {
    std::string lower = text; // capitals and punctuation aside
    for (char& c : lower) {
      const auto byte = static_cast<unsigned char>(c);
      c = std::isalnum(byte) != 0 ? static_cast<char>(std::tolower(byte)) : '_';
    }
    TORCH_CHECK_VALUE(
        false,
        "create: unknown store type ",
        quoted(text),
        "; expected one of ",
        listed(names),
        did_you_mean(lower, names));
  }
  TORCH_CHECK_NOT_IMPLEMENTED(
      registry.types.count(type) != 0,
      "create: type '",
      text,
      "' is not supported yet");
  return type;
}

std::unique_ptr<Store> make_store(
    const std::string& type,
    Runtime& runtime,
    const StoreOptions& options) {
  MakeStore make;
  {
    Registry& registry = Registry::get();
    const std::lock_guard lock(registry.mutex);
    make = registry.types.at(type);
  }
  return make(runtime, options);
}

} // namespace torchkv
