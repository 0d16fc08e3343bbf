#pragma once

#include <cstdint>
#include <string>

#include "../core/export.h"

namespace torchkv {

enum class StoreType : uint8_t { kLocal, kDevice, kNccl };

// "local", "device" or "nccl": also what an alias becomes.
TORCHKV_API const char* name(StoreType type);

// The type that `text` names, itself or by one of MXNet's aliases; matched
// exactly. ValueError for an unknown name, with the valid ones and the nearest;
// NotImplementedError for a type that this build does not have yet.
TORCHKV_API StoreType parse_store_type(const std::string& text);

} // namespace torchkv
