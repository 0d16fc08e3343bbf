#include "checksum.h"

#include <c10/core/InferenceMode.h>
// Defines its functions: to be included here only.
#include <caffe2/serialize/crc_alt.h>

#include <map>
#include <string>
#include <type_traits>
#include <vector>

#include "../core/plain_dispatch.h"

namespace torchkv {
namespace {

class Checksum {
 public:
  uint32_t value() const {
    return crc_;
  }

  void add_bytes(const void* data, size_t size) {
    crc_ = crc32_fast(data, size, crc_);
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
  void add(const Optimizer& optimizer) {
    add(std::string(name_of(optimizer.groups[0])));
    for (const auto& rule : optimizer.groups) {
      add(numbers_of(rule));
    }
    add(numbers_of(optimizer.gradient));
    // Hash tables of equal content may differ in order.
    std::map<std::pair<int64_t, std::string>, KeyOptions> by_key;
    for (const auto& [key, options] : optimizer.keys) {
      const bool is_int = key.kind() == KeyKind::kInt;
      by_key[{is_int ? key.id() : 0, is_int ? "" : key.text()}] = options;
    }
    for (const auto& [key, options] : by_key) {
      add(key.first);
      add(key.second);
      add(options.group);
      add(options.lr_mult);
      add(options.wd_mult);
    }
  }

 private:
  uint32_t crc_ = 0;
};

} // namespace

int64_t checksum_of(const StoreState& state) {
  const c10::InferenceMode normal_tensors(false);
  const PlainDispatch plain;
  Checksum sum;
  sum.add(state.type);
  sum.add(state.key_kind);
  sum.add(state.int_keys);
  sum.add(state.str_keys);
  sum.add(state.values);
  sum.add(state.versions);
  sum.add(state.updater);
  if (state.optimizer) {
    sum.add(*state.optimizer);
    sum.add(state.states);
  }
  return sum.value();
}

} // namespace torchkv
