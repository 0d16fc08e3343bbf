#pragma once

#include "../device/streams.h"
#include "../memory/slices.h"
#include "collective.h"

namespace torchkv {

// NCCL between the CUDA devices of this process. Values and outs that NCCL does
// not support (other dtypes, layouts or several tensors on a device) are left
// to the backends.
class NcclCollective final : public Collective {
 public:
  // RuntimeError if PyTorch has not loaded NCCL, or if launches block.
  NcclCollective(Slices& slices, Streams& streams);

  void reduce(Parts& parts) override;
  void broadcast(Parts& parts) override;

 private:
  Slices& slices_;
  Streams& streams_;
};

} // namespace torchkv
