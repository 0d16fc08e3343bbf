#pragma once

namespace torchkv::kernels::cpu {

// 2-norms, or their squares, of a weight and of its gradient or, for LAMB, of
// the direction of its step.
struct Norms {
  double weight = 0;
  double step = 0;
};

} // namespace torchkv::kernels::cpu
