#include "arguments.h"

#include <algorithm>
#include <sstream>
#include <utility>

namespace torchkv {

std::string Keys::context() const {
  constexpr int64_t kShown = 3;
  if (size() == 1) {
    return list[0].context();
  }
  std::ostringstream out;
  out << "(keys ";
  for (int64_t i = 0; i < std::min(size(), kShown); ++i) {
    out << (i == 0 ? "" : ", ") << list[i];
  }
  if (size() > kShown) {
    out << ", ... " << size() << " in all";
  }
  out << ')';
  return out.str();
}

Tensors::Tensors(std::vector<std::vector<at::Tensor>> groups) {
  for (auto& group : groups) {
    for (auto& tensor : group) {
      flat.push_back(std::move(tensor));
    }
    end_group();
  }
}

Tensors Tensors::replicas(at::TensorList tensors) {
  Tensors result;
  result.flat.append(tensors.begin(), tensors.end());
  result.end_group();
  return result;
}

Tensors Tensors::one_each(at::TensorList tensors) {
  Tensors result;
  for (const auto& tensor : tensors) {
    result.append(tensor);
    result.end_group();
  }
  return result;
}

Tensors Tensors::encoded(
    const at::Tensor& payload,
    std::shared_ptr<const Encoding> encoding) {
  Tensors result(payload);
  result.encodings.push_back(std::move(encoding));
  return result;
}

} // namespace torchkv
