#pragma once

namespace torchkv::kernels {

// torch.optim.SGD without momentum. Weight decay is a choice made outside the
// loop: with none, an infinite weight must not become NaN.
template <bool kHasWeightDecay, typename T, typename Real>
inline T sgd(T stored, T grad, Real learning_rate, Real weight_decay) {
  if constexpr (kHasWeightDecay) {
    grad = grad + weight_decay * stored;
  }
  return stored - learning_rate * grad;
}

} // namespace torchkv::kernels
