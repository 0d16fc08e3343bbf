#pragma once

#include <cstddef>
#include <cstdint>
#include <initializer_list>
#include <utility>
#include <vector>

namespace torchkv::dist::simulation {

// One step of splitmix64: the same numbers on every machine, which those of
// std::uniform_int_distribution and its like are not.
inline uint64_t mix(uint64_t x) {
  x += 0x9e3779b97f4a7c15U;
  x = (x ^ (x >> 30U)) * 0xbf58476d1ce4e5b9U;
  x = (x ^ (x >> 27U)) * 0x94d049bb133111ebU;
  return x ^ (x >> 31U);
}
inline uint64_t mix(uint64_t a, uint64_t b) {
  return mix(mix(a) ^ (b * 0x9e3779b97f4a7c15U));
}

class Random {
 public:
  explicit Random(uint64_t seed) : state_(seed) {}

  uint64_t next() {
    state_ += 0x9e3779b97f4a7c15U;
    return mix(state_);
  }
  // In [low, high).
  double uniform(double low, double high) {
    const double unit = static_cast<double>(next() >> 11U) * 0x1.0p-53;
    return low + unit * (high - low);
  }
  bool chance(double probability) {
    return uniform(0, 1) < probability;
  }
  // In [low, high].
  int integer(int low, int high) {
    const auto count = static_cast<uint64_t>(high - low) + 1;
    return low + static_cast<int>(next() % count);
  }
  template <class T>
  T choose(std::initializer_list<T> of) {
    return of.begin()[next() % of.size()];
  }
  template <class T>
  const T& choose(const std::vector<T>& of) {
    return of[next() % of.size()];
  }
  // `count` of them, in random order.
  template <class T>
  std::vector<T> sample(std::vector<T> of, size_t count) {
    for (size_t i = 0; i < count; ++i) {
      std::swap(of[i], of[i + next() % (of.size() - i)]);
    }
    of.erase(of.begin() + static_cast<std::ptrdiff_t>(count), of.end());
    return of;
  }
  template <class T>
  std::vector<T> shuffled(std::vector<T> of) {
    const size_t count = of.size();
    return sample(std::move(of), count);
  }

 private:
  uint64_t state_;
};

} // namespace torchkv::dist::simulation
