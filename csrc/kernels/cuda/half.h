#pragma once

// Half precision for code that is compiled for GPUs and for the host. The bits
// are the same on both, except for the payload of a NaN.
#ifdef __CUDACC__
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#else
#include <c10/util/BFloat16.h>
#include <c10/util/Half.h>
#endif

#include "../rules.h"

namespace torchkv::kernels::cuda {

#ifdef __CUDACC__
using Half = __half;
using BFloat16 = __nv_bfloat16;

__host__ __device__ inline float to_float(Half number) {
  return __half2float(number);
}
__host__ __device__ inline float to_float(BFloat16 number) {
  return __bfloat162float(number);
}
__host__ __device__ inline void round_to(Half& result, float number) {
  result = __float2half_rn(number);
}
__host__ __device__ inline void round_to(BFloat16& result, float number) {
  result = __float2bfloat16_rn(number);
}
#else
using Half = c10::Half;
using BFloat16 = c10::BFloat16;

inline float to_float(Half number) {
  return number;
}
inline float to_float(BFloat16 number) {
  return number;
}
inline void round_to(Half& result, float number) {
  result = number;
}
inline void round_to(BFloat16& result, float number) {
  result = number;
}
#endif

} // namespace torchkv::kernels::cuda
