#include "store_type.h"

#include <c10/util/Exception.h>

#include <algorithm>
#include <array>
#include <cctype>
#include <numeric>
#include <optional>
#include <vector>

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

// Levenshtein's distance.
size_t edit_distance(const std::string& a, const std::string& b) {
  std::vector<size_t> row(b.size() + 1);
  std::iota(row.begin(), row.end(), size_t{0});
  for (size_t i = 1; i <= a.size(); ++i) {
    size_t diagonal = row[0];
    row[0] = i;
    for (size_t j = 1; j <= b.size(); ++j) {
      const size_t replaced = diagonal + (a[i - 1] == b[j - 1] ? 0 : 1);
      diagonal = row[j];
      row[j] = std::min({replaced, row[j] + 1, row[j - 1] + 1});
    }
  }
  return row.back();
}

// The valid name nearest to `text`, capitals and punctuation aside, where one
// is near enough to be what was meant; else nothing.
std::string suggestion(const std::string& text) {
  std::string lower;
  std::transform(
      text.begin(), text.end(), std::back_inserter(lower), [](unsigned char c) {
        return std::isalnum(c) != 0 ? static_cast<char>(std::tolower(c)) : '_';
      });
  const char* nearest = nullptr;
  size_t least = std::max<size_t>(lower.size() / 3, 1) + 1;
  for (const auto& candidate : kNames) {
    const size_t distance = edit_distance(lower, candidate.text);
    if (distance < least) {
      least = distance;
      nearest = candidate.text;
    }
  }
  return nearest == nullptr ? std::string()
                            : c10::str("; did you mean '", nearest, "'?");
}

std::string valid_names() {
  std::string result;
  for (const auto& candidate : kNames) {
    result += c10::str(result.empty() ? "'" : ", '", candidate.text, "'");
  }
  return result;
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
      ", but got '",
      text,
      "'",
      suggestion(text));
  TORCH_CHECK_NOT_IMPLEMENTED(
      found->type.has_value(),
      "create: expected 'local', 'device' or 'nccl', but got '",
      text,
      "', which is not supported yet");
  return *found->type;
}

} // namespace torchkv
