#include "type.h"

#include <c10/util/Exception.h>

#include <algorithm>
#include <array>
#include <cctype>
#include <optional>
#include <vector>

#include "../core/text.h"

namespace torchkv {
namespace {

struct Name {
  const char* text;
  std::optional<StoreType> type; // none: not in this build
  bool is_alias;
};

constexpr std::array<Name, 10> kNames{{
    {"local", StoreType::kLocal, false},
    {"device", StoreType::kDevice, false},
    {"nccl", StoreType::kNccl, false},
    {"dist_sync", std::nullopt, false},
    {"dist_async", std::nullopt, false},
    {"dist_device_sync", std::nullopt, false},
    {"dist", std::nullopt, true},
    {"local_update_cpu", StoreType::kLocal, true},
    {"local_allreduce_cpu", StoreType::kLocal, true},
    {"local_allreduce_device", StoreType::kDevice, true},
}};

std::string valid_names() {
  std::string result;
  for (const auto& candidate : kNames) {
    result += c10::str(result.empty() ? "'" : ", '", candidate.text, "'");
  }
  return result;
}

// Capitals and punctuation aside.
std::string suggestion(const std::string& text) {
  std::string lower;
  std::transform(
      text.begin(), text.end(), std::back_inserter(lower), [](unsigned char c) {
        return std::isalnum(c) != 0 ? static_cast<char>(std::tolower(c)) : '_';
      });
  std::vector<std::string> names;
  names.reserve(kNames.size());
  for (const auto& candidate : kNames) {
    names.emplace_back(candidate.text);
  }
  return did_you_mean(lower, names);
}

} // namespace

const char* name(StoreType type) {
  const auto* const found =
      std::find_if(kNames.begin(), kNames.end(), [&](const Name& candidate) {
        return candidate.type == type && !candidate.is_alias;
      });
  return found->text;
}

StoreType parse_store_type(const std::string& text) {
  const auto* const found =
      std::find_if(kNames.begin(), kNames.end(), [&](const Name& candidate) {
        return text == candidate.text;
      });
  TORCH_CHECK_VALUE(
      found != kNames.end(),
      "create: expected a store type out of ",
      valid_names(),
      ", but got ",
      quoted(text),
      suggestion(text));
  TORCH_CHECK_NOT_IMPLEMENTED(
      found->type.has_value(),
      "create: expected 'local', 'device' or 'nccl', but got '",
      text,
      "', which is not supported yet");
  return *found->type;
}

} // namespace torchkv
