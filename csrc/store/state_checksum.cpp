#include <c10/core/InferenceMode.h>

#include <map>
#include <type_traits>
#include <utility>

#include "../core/checksum.h"
#include "../core/key.h"
#include "../core/plain_dispatch.h"
#include "state.h"

namespace torchkv {
namespace {

class Checksum {
 public:
  uint32_t value() const {
    return crc_;
  }

  void add_bytes(const void* data, size_t size) {
    crc_ = crc32(data, size, crc_);
  }
  template <class T, class = std::enable_if_t<std::is_arithmetic_v<T>>>
  void add(T number) {
    add_bytes(&number, sizeof(number));
  }
  void add(const std::string& text) {
    add(text.size());
    add_bytes(text.data(), text.size());
  }
  void add(const at::Tensor& tensor) {
    add(static_cast<int64_t>(tensor.scalar_type()));
    add(tensor.dim());
    for (const int64_t size : tensor.sizes()) {
      add(size);
    }
    const at::Tensor elements = tensor.cpu().contiguous();
    add_bytes(elements.const_data_ptr(), elements.nbytes());
  }
  template <class T>
  void add(const std::vector<T>& items) {
    add(items.size());
    for (const auto& item : items) {
      add(item);
    }
  }
  void add(const NumbersByName& numbers) {
    add(numbers.size());
    for (const auto& [name, number] : numbers) {
      add(name);
      add(number);
    }
  }
  void add(const KeyState& state) {
    add(state.step);
    add(state.num_accumulated);
    for (const auto& [name, tensor] :
         std::map(state.tensors.begin(), state.tensors.end())) {
      add(name);
      add(tensor);
    }
  }
  void add(const std::map<size_t, StoreState::Rows>& rows) {
    for (const auto& [key, of_key] : rows) {
      add(key);
      add(of_key.ids);
      add(of_key.num_rows.value_or(-1));
      add(std::string(name_of(of_key.init)));
      add(numbers_of(of_key.init));
      add(of_key.init.seed);
    }
  }
  void add(const Compression& compression) {
    for (const auto& codec : compression.groups) {
      add(std::string(name_of(codec)));
      add(numbers_of(codec));
    }
    for (const auto& [key, group] : by_key(compression.keys)) {
      add(key);
      add(group);
    }
  }
  void add(const Optimizer& optimizer) {
    add(std::string(name_of(optimizer.groups[0])));
    for (const auto& rule : optimizer.groups) {
      add(numbers_of(rule));
    }
    add(shared_numbers(optimizer));
    for (const auto& [key, options] : by_key(optimizer.keys)) {
      add(key);
      add(options.group);
      add(options.lr_mult);
      add(options.wd_mult);
    }
  }

 private:
  using KeyParts = std::pair<int64_t, std::string>;

  void add(const KeyParts& key) {
    add(key.first);
    add(key.second);
  }
  // Hash tables of equal content may differ in order.
  template <class T>
  static std::map<KeyParts, T> by_key(
      const ska::flat_hash_map<Key, T, KeyHash>& items) {
    std::map<KeyParts, T> result;
    for (const auto& [key, item] : items) {
      const bool is_int = key.kind() == KeyKind::kInt;
      result[{is_int ? key.id() : 0, is_int ? "" : key.text()}] = item;
    }
    return result;
  }

  uint32_t crc_ = 0;
};

} // namespace

int64_t StoreState::checksum() const {
  const c10::InferenceMode normal_tensors(false);
  const PlainDispatch plain;
  Checksum sum;
  sum.add(type);
  sum.add(key_kind);
  sum.add(int_keys);
  sum.add(str_keys);
  sum.add(values);
  sum.add(rows);
  sum.add(versions);
  sum.add(updater);
  if (optimizer) {
    sum.add(*optimizer);
    sum.add(states);
  }
  if (compression) {
    sum.add(*compression);
    sum.add(residuals);
    sum.add(num_compressed);
  }
  return sum.value();
}

} // namespace torchkv
