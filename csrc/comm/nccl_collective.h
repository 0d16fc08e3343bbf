#pragma once

#include "../device/streams.h"
#include "../memory/slices.h"
#include "collective.h"

namespace torchkv {

// NCCL between the CUDA devices of this process. Values and outs that NCCL
// cannot carry (other dtypes, layouts or several tensors on a device) are left
// to the backends.
class NcclCollective final : public Collective {
 public:
  // RuntimeError where PyTorch has loaded no NCCL, or where launches block.
  NcclCollective(Slices& slices, Streams& streams);

  void reduce(Parts& parts) override;
  void broadcast(Parts& parts) override;

 private:
  Slices& slices_;
  Streams& streams_;
};

} // namespace torchkv
