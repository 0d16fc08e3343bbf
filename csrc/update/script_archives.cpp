#include "script_archives.h"

#include <ATen/ops/cat.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/equal.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <cstring>
#include <string_view>

namespace torchkv {
namespace {

// Then their number and sizes as int64, and the archives. A TorchScript archive
// is a ZIP file, which begins with "PK".
constexpr std::string_view kPrefix = "torchkv updaters";

at::Tensor as_bytes(const void* data, size_t size) {
  at::Tensor result = at::empty({static_cast<int64_t>(size)}, at::kByte);
  std::memcpy(result.mutable_data_ptr(), data, size);
  return result;
}

} // namespace

at::Tensor pack_archives(const std::vector<at::Tensor>& archives) {
  const bool are_equal =
      std::all_of(archives.begin(), archives.end(), [&](const auto& archive) {
        return at::equal(archive, archives[0]);
      });
  if (are_equal) {
    return archives[0];
  }
  std::vector<int64_t> sizes{static_cast<int64_t>(archives.size())};
  for (const auto& archive : archives) {
    sizes.push_back(archive.numel());
  }
  std::vector<at::Tensor> parts{
      as_bytes(kPrefix.data(), kPrefix.size()),
      as_bytes(sizes.data(), sizes.size() * sizeof(int64_t))};
  parts.insert(parts.end(), archives.begin(), archives.end());
  return at::cat(parts);
}

std::vector<at::Tensor> unpack_archives(const at::Tensor& bytes) {
  const at::Tensor flat = bytes.contiguous();
  const std::string_view text(
      static_cast<const char*>(flat.const_data_ptr()), flat.nbytes());
  if (text.substr(0, kPrefix.size()) != kPrefix) {
    return {bytes};
  }
  int64_t rest = flat.numel() - static_cast<int64_t>(kPrefix.size());
  const char* next = text.data() + kPrefix.size();
  const auto number = [&] {
    rest -= static_cast<int64_t>(sizeof(int64_t));
    TORCH_CHECK_VALUE(rest >= 0, "load: the updater is damaged");
    int64_t result = 0;
    std::memcpy(&result, next, sizeof(result));
    next += sizeof(result);
    return result;
  };
  const int64_t count = number();
  TORCH_CHECK_VALUE(
      count > 0 && count <= rest / static_cast<int64_t>(sizeof(int64_t)),
      "load: the updater is damaged");
  std::vector<int64_t> sizes(static_cast<size_t>(count));
  std::generate(sizes.begin(), sizes.end(), number);
  std::vector<at::Tensor> archives;
  archives.reserve(sizes.size());
  int64_t begin = flat.numel() - rest;
  for (const int64_t size : sizes) {
    rest -= size;
    TORCH_CHECK_VALUE(size >= 0 && rest >= 0, "load: the updater is damaged");
    archives.push_back(flat.slice(0, begin, begin + size).clone());
    begin += size;
  }
  TORCH_CHECK_VALUE(rest == 0, "load: the updater is damaged");
  return archives;
}

} // namespace torchkv
