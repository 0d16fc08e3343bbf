#pragma once

#include <dlfcn.h>
#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "lines_c_api.h"

namespace torchkv::testing {

// The CPU kernels compiled for one instruction set.
using Function = decltype(&torchkv_sum_line);

struct Level {
  const char* name;
  Function function;
};

#ifdef TORCHKV_LINES_FOLDER
inline Function load_level(const std::string& name) {
  const std::string path =
      TORCHKV_LINES_FOLDER "/libtorchkv_lines_" + name + ".so";
  void* library = dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL);
  void* function =
      library == nullptr ? nullptr : dlsym(library, "torchkv_sum_line");
  EXPECT_NE(function, nullptr) << dlerror();
  return reinterpret_cast<Function>(function);
}
#endif

// The kernels with clones, of which the loader selects the best, and those for
// each instruction set that this processor supports.
inline const std::vector<Level>& levels() {
  static const std::vector<Level> all = [] {
    std::vector<Level> found{{"clones", &torchkv_sum_line}};
#ifdef TORCHKV_LINES_FOLDER
    found.push_back({"x86-64", load_level("x86-64")});
    // By feature, because gcc 11 does not know the names of the levels.
    const bool v3 = __builtin_cpu_supports("avx2") &&
        __builtin_cpu_supports("fma") && __builtin_cpu_supports("bmi") &&
        __builtin_cpu_supports("bmi2");
    const bool v4 = v3 && __builtin_cpu_supports("avx512f") &&
        __builtin_cpu_supports("avx512bw") &&
        __builtin_cpu_supports("avx512cd") &&
        __builtin_cpu_supports("avx512dq") &&
        __builtin_cpu_supports("avx512vl");
    if (v3) {
      found.push_back({"x86-64-v3", load_level("x86-64-v3")});
    }
    if (v4) {
      found.push_back({"x86-64-v4", load_level("x86-64-v4")});
    }
#endif
    return found;
  }();
  return all;
}

} // namespace torchkv::testing
