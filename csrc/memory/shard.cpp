#include "shard.h"

#include <algorithm>
#include <numeric>

namespace torchkv {
namespace {

int64_t bytes_of(const ValueSize& value) {
  return value.num_elements * value.element_size;
}

// How many of `bytes` each place receives so that all end up equally full.
std::vector<int64_t> rooms_of(c10::ArrayRef<int64_t> loads, int64_t bytes) {
  std::vector<int64_t> sorted = loads.vec();
  std::sort(sorted.begin(), sorted.end());
  int64_t level = 0;
  int64_t sum = bytes; // and of the places below the level
  for (size_t n = 0; n < sorted.size() && (n == 0 || sorted[n] < level); ++n) {
    sum += sorted[n];
    const auto count = static_cast<int64_t>(n) + 1;
    level = (sum + count - 1) / count;
  }
  std::vector<int64_t> rooms;
  for (const int64_t load : loads) {
    rooms.push_back(std::max<int64_t>(level - load, 0));
  }
  return rooms;
}

// How many of the `rest` bytes of a value go to a place with `room`: all, none,
// or as many as leave two shards of at least `grain`.
int64_t bytes_taken(int64_t rest, int64_t room, int64_t grain) {
  if (rest < 2 * grain) {
    return room >= rest - rest / 2 ? rest : 0;
  }
  const int64_t rounded =
      (std::max<int64_t>(room, 0) + grain / 2) / grain * grain;
  if (rounded > rest - grain) {
    return room >= rest - grain / 2 ? rest : (rest - grain) / grain * grain;
  }
  return rounded;
}

} // namespace

std::vector<Shard> shard_all(
    c10::ArrayRef<ValueSize> values,
    c10::ArrayRef<int64_t> loads,
    int64_t grain) {
  const int64_t total = std::accumulate(
      values.begin(), values.end(), int64_t{0}, [](int64_t sum, auto& value) {
        return sum + bytes_of(value);
      });
  const std::vector<int64_t> rooms = rooms_of(loads, total);
  std::vector<Shard> shards;
  size_t place = 0;
  int64_t room = rooms[0];
  for (size_t i = 0; i < values.size(); ++i) {
    const int64_t size = values[i].element_size;
    const int64_t end = bytes_of(values[i]);
    for (int64_t begin = 0;;) {
      const bool is_last = place + 1 == rooms.size();
      const int64_t rest = end - begin;
      const int64_t taken = is_last ? rest : bytes_taken(rest, room, grain);
      if (taken != 0 || rest == 0) {
        shards.push_back({i, place, begin / size, (begin + taken) / size});
      }
      begin += taken;
      room -= taken;
      if (taken == rest) {
        break;
      }
      room = rooms[++place];
    }
  }
  return shards;
}

std::vector<Shard> shard_each(
    c10::ArrayRef<ValueSize> values,
    c10::ArrayRef<int64_t> loads,
    int64_t grain) {
  const auto num_places = static_cast<int64_t>(loads.size());
  std::vector<int64_t> sums = loads.vec();
  std::vector<Shard> shards;
  for (size_t i = 0; i < values.size(); ++i) {
    const int64_t size = values[i].element_size;
    const int64_t end = values[i].num_elements;
    if (bytes_of(values[i]) < grain * num_places) {
      const auto least = std::min_element(sums.begin(), sums.end());
      *least += end * size;
      shards.push_back({i, static_cast<size_t>(least - sums.begin()), 0, end});
      continue;
    }
    const int64_t align = std::max<int64_t>(16 / size, 1);
    const int64_t per_place = align * num_places;
    const int64_t step = (end + per_place - 1) / per_place * align;
    int64_t begin = 0;
    for (size_t place = 0; place < sums.size() && begin < end; ++place) {
      const int64_t stop = std::min(begin + step, end);
      shards.push_back({i, place, begin, stop});
      sums[place] += (stop - begin) * size;
      begin = stop;
    }
  }
  return shards;
}

} // namespace torchkv
