#pragma once

// TORCHKV_CLONES before a function compiles it for AVX-512 (x86-64-v4), AVX2
// (x86-64-v3) and plain x86-64, and the loader takes the best that the
// processor has. What such a function calls must be inlined into it or have
// clones of its own. All clones give the same bits: the build forbids
// contracting a * b + c (-ffp-contract=off). Such functions live in unnamed
// namespaces: gcc would export them from the library, hidden or not.
//
// TORCHKV_F16C is the like for a pair of functions of one signature, written
// with and without the instructions that convert half precision:
//
//   TORCHKV_F16C void f() { _mm256_cvtph_ps(...) }
//   TORCHKV_F16C_DEFAULT void f() { ... }
//
// TORCHKV_HAS_F16C says whether the first is to be written at all,
// TORCHKV_ONLY_F16C that the second is not.
//
// Choosing at load time takes gcc 12 and the GNU C library (clang clones no
// templates, and older gcc does not know these names). Elsewhere there is one
// version, for the target that the compiler was told of, and under sanitizers,
// which are not ready yet when the choice is made.
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
