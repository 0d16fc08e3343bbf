#pragma once

// TORCHKV_CLONES compiles a function for AVX-512 (x86-64-v4), AVX2 (x86-64-v3)
// and baseline x86-64; the loader selects the best one that the processor
// supports. Functions that it calls must be inlined into it or have clones,
// too. All clones give the same bits: the build disables the contraction of a *
// b + c (-ffp-contract=off). Such functions must be in unnamed namespaces,
// because gcc exports them from the library even if they are hidden.
//
// TORCHKV_F16C does the same for two functions of one signature, written with
// and without the instructions that convert half precision:
//
//   TORCHKV_F16C void f() { _mm256_cvtph_ps(...) }
//   TORCHKV_F16C_DEFAULT void f() { ... }
//
// TORCHKV_HAS_F16C is 1 if the first must be defined; TORCHKV_ONLY_F16C is
// defined if the second must not be.
//
// Selection at load time requires gcc 12 and glibc: clang cannot clone
// templates, and older versions of gcc do not know these names. Otherwise, and
// under sanitizers, which are not initialized yet when the loader selects,
// there is one version, for the target of the compiler.
#if defined(__x86_64__) && defined(__GLIBC__) && !defined(__clang__) && \
    __GNUC__ >= 12 && !defined(__SANITIZE_THREAD__) &&                  \
    !defined(__SANITIZE_ADDRESS__) && !defined(TORCHKV_NO_CLONES)
#define TORCHKV_CLONES \
  __attribute__((target_clones("arch=x86-64-v4", "arch=x86-64-v3", "default")))
#define TORCHKV_F16C __attribute__((target("arch=x86-64-v3")))
#define TORCHKV_F16C_DEFAULT __attribute__((target("default")))
#define TORCHKV_HAS_F16C 1
#else
#define TORCHKV_CLONES
#define TORCHKV_F16C
#define TORCHKV_F16C_DEFAULT
#if defined(__F16C__) && defined(__AVX__)
#define TORCHKV_HAS_F16C 1
#define TORCHKV_ONLY_F16C 1
#else
#define TORCHKV_HAS_F16C 0
#endif
#endif
