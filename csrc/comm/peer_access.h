#pragma once

#include <c10/core/Device.h>

#include <map>
#include <mutex>
#include <utility>

#include "../export.h"
#include "../runtime.h"

namespace torchkv {

// Which CUDA devices read and write each other's memory. Asked for and switched
// on when it is first needed, for the life of the process. Any thread.
class TORCHKV_API PeerAccess {
 public:
  explicit PeerAccess(Runtime& runtime) : runtime_(runtime) {}

  // Whether kernels on `device` may use memory of `peer`. The first time, both
  // devices wait for each other; later it costs a lookup.
  bool may_use(c10::Device device, c10::Device peer);

 private:
  bool enable(c10::Device device, c10::Device peer);

  Runtime& runtime_;
  std::mutex mutex_; // guards the rest
  std::map<std::pair<c10::DeviceIndex, c10::DeviceIndex>, bool> known_;
};

} // namespace torchkv
