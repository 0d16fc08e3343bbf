#pragma once

#include <functional>
#include <memory>
#include <string>

#include "../core/export.h"
#include "../device/runtime.h"
#include "options.h"
#include "store.h"

namespace torchkv {

// The types of stores: "local", "device", "nccl", "dist_sync", "dist_async",
// and those that programs add.

using MakeStore = std::function<
    std::unique_ptr<Store>(Runtime& runtime, const StoreOptions& options)>;

// Adds a type, which all bindings then create by its name. The interface Store
// may change with each version of torchkv. ValueError for an empty name and for
// one that is taken, also as an alias. Thread-safe.
TORCHKV_API void register_store(const std::string& type, MakeStore make);

// Replaces the function of a type, and returns the previous one; an empty one
// stands for no such type. For tests.
TORCHKV_API MakeStore replace_store(const std::string& type, MakeStore make);

// The type that `text` names, itself or by one of MXNet's aliases; matched
// exactly. ValueError for an unknown name, with the valid ones and the nearest;
// NotImplementedError for a type that this build does not have yet.
TORCHKV_API std::string canonical_type(const std::string& text);

// REQUIRES: a result of canonical_type.
TORCHKV_API std::unique_ptr<Store> make_store(
    const std::string& type,
    Runtime& runtime,
    const StoreOptions& options);

} // namespace torchkv
