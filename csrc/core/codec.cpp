#include "codec.h"

#include <c10/util/Exception.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <vector>

#include "text.h"

namespace torchkv {
namespace {

using Id = Codec::Id;

struct CodecInfo {
  Id id;
  const char* name;
  std::array<const char*, 2> options; // null where it has fewer
};

constexpr std::array<CodecInfo, 8> kCodecs{{
    {Id::kNone, "none", {}},
    {Id::k1Bit, "1bit", {"threshold"}},
    {Id::k2Bit, "2bit", {"threshold"}},
    {Id::kFp16, "fp16", {}},
    {Id::kBf16, "bf16", {}},
    {Id::kFp8, "fp8", {}},
    {Id::kInt4, "int4", {"seed"}},
    {Id::kTopK, "topk", {"k", "ratio"}},
}};

const CodecInfo& info_of(Id id) {
  return kCodecs.at(static_cast<size_t>(id));
}

const CodecInfo& find_codec(const char* op, const std::string& name) {
  std::vector<std::string> names;
  for (const auto& info : kCodecs) {
    if (name == info.name) {
      return info;
    }
    names.emplace_back(info.name);
  }
  TORCH_CHECK_VALUE(
      false,
      op,
      ": unknown compression ",
      quoted(name),
      "; expected one of ",
      listed(names),
      did_you_mean(name, names));
}

void check_option(
    const char* op,
    const CodecInfo& info,
    const std::string& name) {
  std::vector<std::string> names;
  for (const char* option : info.options) {
    if (option != nullptr) {
      names.emplace_back(option);
    }
  }
  TORCH_CHECK_VALUE(
      std::find(names.begin(), names.end(), name) != names.end(),
      op,
      ": unexpected option ",
      quoted(name),
      " for compression '",
      info.name,
      "'; expected ",
      names.empty() ? "none" : listed(names),
      did_you_mean(name, names));
}

} // namespace

int64_t Codec::num_sent(int64_t num_elements) const {
  // 0.07 * 100 is a little more than 7.
  const auto share = static_cast<int64_t>(
      std::ceil(ratio * static_cast<double>(num_elements) * (1 - 1e-12)));
  return std::min(std::max(k == 0 ? share : k, int64_t{1}), num_elements);
}

Codec make_codec(
    const char* op,
    const std::string& name,
    const NumbersByName& numbers) {
  const CodecInfo& info = find_codec(op, name);
  Codec codec;
  codec.id = info.id;
  for (const auto& [option, value] : numbers) {
    check_option(op, info, option);
    if (option == "threshold") {
      codec.threshold = value;
    } else if (option == "k") {
      codec.k = whole_number(op, option, value, 1);
    } else if (option == "ratio") {
      codec.ratio = value;
    } else {
      codec.seed = whole_number(op, option, value, 0);
    }
  }
  TORCH_CHECK_VALUE(
      is_finite_float(codec.threshold) &&
          (codec.id == Id::k1Bit || static_cast<float>(codec.threshold) > 0),
      op,
      ": expected threshold to be a finite number",
      codec.id == Id::k1Bit ? "" : " greater than 0",
      ", but got ",
      codec.threshold);
  TORCH_CHECK_VALUE(
      codec.ratio > 0 && codec.ratio <= 1,
      op,
      ": expected ratio to be greater than 0 and at most 1, but got ",
      codec.ratio);
  TORCH_CHECK_VALUE(
      numbers.count("k") == 0 || numbers.count("ratio") == 0,
      op,
      ": expected 'k' or 'ratio' for compression 'topk', but got both");
  return codec;
}

NumbersByName numbers_of(const Codec& codec) {
  switch (codec.id) {
    case Id::k1Bit:
    case Id::k2Bit:
      return {{"threshold", codec.threshold}};
    case Id::kInt4:
      return {{"seed", static_cast<double>(codec.seed)}};
    case Id::kTopK:
      if (codec.k != 0) {
        return {{"k", static_cast<double>(codec.k)}};
      }
      return {{"ratio", codec.ratio}};
    default:
      return {};
  }
}

const char* name_of(const Codec& codec) {
  return info_of(codec.id).name;
}

} // namespace torchkv
