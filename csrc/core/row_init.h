#pragma once

#include <cstdint>
#include <string>

#include "export.h"
#include "rule.h"

namespace torchkv {

// The value that rows of a row-sparse key have until they are pushed: a
// function of the seed, the row's id and the column, on every machine.
struct RowInit {
  enum class Id : uint8_t { kZeros, kNormal, kUniform };

  Id id = Id::kZeros;
  double mean = 0; // of normal
  double std = 1;
  double low = 0; // of uniform, which is in [low, high)
  double high = 1;
  int64_t seed = 0;
};

// The initial value with this name ("zeros", "normal" or "uniform") and these
// parameters; others have their defaults. ValueError for an unknown name or
// parameter, or an invalid number.
TORCHKV_API RowInit make_row_init(
    const char* op,
    const std::string& name,
    const NumbersByName& numbers,
    int64_t seed);
TORCHKV_API NumbersByName numbers_of(const RowInit& init);
TORCHKV_API const char* name_of(const RowInit& init);

} // namespace torchkv
