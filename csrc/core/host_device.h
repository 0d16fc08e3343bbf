#pragma once

// For formulas that GPU kernels call, too.
#ifdef __CUDACC__
#define TORCHKV_HOST_DEVICE __host__ __device__
#else
#define TORCHKV_HOST_DEVICE
#endif
