#pragma once

#include <c10/core/Device.h>

#include "../core/export.h"
#include "runtime.h"

namespace torchkv {

// Whether kernels on `device` may use memory of `peer`, CUDA devices both. The
// first time, direct access is asked for and switched on, and both devices wait
// for each other; later it costs a lookup without a lock, for the life of the
// process. Never where TORCHKV_P2P=0. Any thread.
TORCHKV_API bool may_use_peer(
    Runtime& runtime,
    c10::Device device,
    c10::Device peer);

// For tests: asks again.
TORCHKV_API void forget_peers();

} // namespace torchkv
