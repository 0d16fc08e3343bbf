#include "row_memory.h"

#include <c10/util/BFloat16.h>
#include <c10/util/Half.h>

#include <array>
#include <cmath>
#include <cstring>
#include <limits>

#include "../../core/mixed_bits.h"
#include "cache_line.h"
#include "parallel.h"

namespace torchkv::kernels::cpu {
namespace {

// std::log may differ between libraries in the last bit.
double same_log(double x) {
  int exponent = 0;
  double m = std::frexp(x, &exponent); // in [0.5, 1)
  if (m < 0.70710678118654752440) {
    m *= 2;
    --exponent;
  }
  // log(m) = 2 artanh((m - 1) / (m + 1)), whose argument is below 0.172.
  const double s = (m - 1) / (m + 1);
  const double s2 = s * s;
  double sum = 0;
  for (int k = 21; k >= 1; k -= 2) {
    sum = sum * s2 + 1.0 / k;
  }
  return 2 * s * sum + exponent * 0.69314718055994530942;
}

template <size_t n>
double polynomial(const std::array<double, n>& coefficients, double x) {
  double sum = 0;
  for (const double coefficient : coefficients) { // of the highest power first
    sum = sum * x + coefficient;
  }
  return sum;
}

// The quantile of the standard normal distribution: PPND16 of AS241.
double normal_quantile(double p) {
  constexpr std::array<double, 8> kA{
      2509.0809287301226727,
      33430.575583588128105,
      67265.770927008700853,
      45921.953931549871457,
      13731.693765509461125,
      1971.5909503065514427,
      133.14166789178437745,
      3.387132872796366608};
  constexpr std::array<double, 8> kB{
      5226.495278852545925,
      28729.085735721942674,
      39307.89580009271061,
      21213.794301586595867,
      5394.1960214247511077,
      687.1870074920579083,
      42.313330701600911252,
      1};
  constexpr std::array<double, 8> kC{
      7.7454501427834140764e-4,
      .0227238449892691845833,
      .24178072517745061177,
      1.27045825245236838258,
      3.64784832476320460504,
      5.7694972214606914055,
      4.6303378461565452959,
      1.42343711074968357734};
  constexpr std::array<double, 8> kD{
      1.05075007164441684324e-9,
      5.475938084995344946e-4,
      .0151986665636164571966,
      .14810397642748007459,
      .68976733498510000455,
      1.6763848301838038494,
      2.05319162663775882187,
      1};
  constexpr std::array<double, 8> kE{
      2.01033439929228813265e-7,
      2.71155556874348757815e-5,
      .0012426609473880784386,
      .026532189526576123093,
      .29656057182850489123,
      1.7848265399172913358,
      5.4637849111641143699,
      6.6579046435011037772};
  constexpr std::array<double, 8> kF{
      2.04426310338993978564e-15,
      1.4215117583164458887e-7,
      1.8463183175100546818e-5,
      7.868691311456132591e-4,
      .0148753612908506148525,
      .13692988092273580531,
      .59983220655588793769,
      1};
  const double q = p - 0.5;
  if (std::abs(q) <= 0.425) {
    const double r = 0.180625 - q * q;
    return q * polynomial(kA, r) / polynomial(kB, r);
  }
  const double r = std::sqrt(-same_log(q < 0 ? p : 1 - p));
  const double x = r <= 5 ? polynomial(kC, r - 1.6) / polynomial(kD, r - 1.6)
                          : polynomial(kE, r - 5) / polynomial(kF, r - 5);
  return q < 0 ? -x : x;
}

// The next number below.
float below(float x) {
  return std::nextafter(x, -std::numeric_limits<float>::infinity());
}
double below(double x) {
  return std::nextafter(x, -std::numeric_limits<double>::infinity());
}
template <class T> // of 16 bits
T below(T x) {
  constexpr uint32_t kSign = 0x8000;
  const uint32_t own = x.x;
  const bool is_zero = (own & ~kSign) == 0;
  const bool is_negative = (own & kSign) != 0;
  const uint32_t bits = is_zero ? kSign + 1 : is_negative ? own + 1 : own - 1;
  return T(static_cast<uint16_t>(bits), T::from_bits());
}

template <class T>
void init_row(const RowInit& init, int64_t id, int64_t size, T* row) {
  const uint64_t stream = mixed_bits(
      mixed_bits(static_cast<uint64_t>(init.seed)) ^ static_cast<uint64_t>(id));
  for (int64_t i = 0; i < size; ++i) {
    const uint64_t bits = mixed_bits(stream + static_cast<uint64_t>(i)) >> 11U;
    const auto number = static_cast<double>(bits); // below 2^53
    const double value = init.id == RowInit::Id::kNormal
        ? init.mean + init.std * normal_quantile((number + 0.5) * 0x1p-53)
        : init.low + (init.high - init.low) * (number * 0x1p-53);
    if constexpr (sizeof(T) == 2) {
      row[i] = T(static_cast<float>(value));
    } else {
      row[i] = static_cast<T>(value);
    }
    // Rounding may give the limit itself.
    const bool is_limit = init.id == RowInit::Id::kUniform &&
        init.low < init.high && static_cast<double>(row[i]) >= init.high;
    row[i] = is_limit ? below(row[i]) : row[i];
  }
}

void init_one(
    const RowMemory& kind,
    const RowInit& init,
    int64_t id,
    char* row) {
  if (init.id == RowInit::Id::kZeros) {
    std::memset(row, 0, kind.row_bytes());
  } else if (kind.dtype == c10::kFloat) {
    init_row(init, id, kind.row_size, reinterpret_cast<float*>(row));
  } else if (kind.dtype == c10::kDouble) {
    init_row(init, id, kind.row_size, reinterpret_cast<double*>(row));
  } else if (kind.dtype == c10::kHalf) {
    init_row(init, id, kind.row_size, reinterpret_cast<c10::Half*>(row));
  } else {
    init_row(init, id, kind.row_size, reinterpret_cast<c10::BFloat16*>(row));
  }
}

constexpr int64_t kGrain = 16; // rows

} // namespace

void gather_rows(
    const RowMemory& rows,
    const int64_t* slots,
    const int64_t* ids,
    int64_t count,
    const RowInit& init,
    char* out) {
  constexpr int64_t kAhead = 16; // rows
  const int64_t row_bytes = rows.row_bytes();
  parallel_spans(
      1,
      [&](int64_t /*job*/) { return Work{count, 2 * row_bytes, kGrain}; },
      [&](int64_t /*job*/, int64_t begin, int64_t end, bool /*stream*/) {
        for (int64_t i = begin; i < end; ++i) {
          if (i + kAhead < end && slots[i + kAhead] >= 0) {
            prefetch_row(rows.data + slots[i + kAhead] * row_bytes, row_bytes);
          }
          char* const row = out + i * row_bytes;
          if (slots[i] >= 0) {
            std::memcpy(row, rows.data + slots[i] * row_bytes, row_bytes);
          } else {
            init_one(rows, init, ids[i], row);
          }
        }
      });
}

void scatter_rows(
    const RowMemory& rows,
    const int64_t* slots,
    int64_t count,
    const char* given) {
  const int64_t row_bytes = rows.row_bytes();
  parallel_spans(
      1,
      [&](int64_t /*job*/) { return Work{count, 2 * row_bytes, kGrain}; },
      [&](int64_t /*job*/, int64_t begin, int64_t end, bool /*stream*/) {
        for (int64_t i = begin; i < end; ++i) {
          std::memcpy(
              rows.data + slots[i] * row_bytes,
              given + i * row_bytes,
              row_bytes);
        }
      });
}

void move_rows(
    const RowMemory& rows,
    const int64_t* from,
    const int64_t* to,
    int64_t count) {
  const int64_t row_bytes = rows.row_bytes();
  for (int64_t i = 0; i < count; ++i) {
    std::memcpy(
        rows.data + to[i] * row_bytes,
        rows.data + from[i] * row_bytes,
        row_bytes);
  }
}

void init_rows(
    const RowMemory& rows,
    const int64_t* ids,
    int64_t count,
    const RowInit& init) {
  const int64_t row_bytes = rows.row_bytes();
  parallel_spans(
      1,
      [&](int64_t /*job*/) { return Work{count, row_bytes, kGrain}; },
      [&](int64_t /*job*/, int64_t begin, int64_t end, bool /*stream*/) {
        for (int64_t i = begin; i < end; ++i) {
          init_one(rows, init, ids[i], rows.data + i * row_bytes);
        }
      });
}

} // namespace torchkv::kernels::cpu
