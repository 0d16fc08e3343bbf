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

// Registers `make` for `type` and returns the previous function, or an empty
// one. An empty `make` removes the type. Thread-safe.
TORCHKV_API MakeStore register_store(const std::string& type, MakeStore make);

// The type that `text` names, itself or by one of MXNet's aliases; matched
// exactly. ValueError for an unknown name, with the valid ones and the nearest;
// NotImplementedError for a type that this build does not have yet.
TORCHKV_API std::string canonical_type(const std::string& text);

// REQUIRES: a result of canonical_type.
std::unique_ptr<Store> make_store(
    const std::string& type,
    Runtime& runtime,
    const StoreOptions& options);

} // namespace torchkv
