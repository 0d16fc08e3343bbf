#include "rule.h"

#include <ATen/ops/empty.h>
#include <c10/util/Exception.h>

#include <cmath>
#include <cstring>

#include "plain_dispatch.h"

namespace torchkv {
namespace {

// Little-endian, as every platform of torchkv is.
struct Image {
  char magic[8] = {'t', 'k', 'v', 'r', 'u', 'l', 'e', '1'};
  uint64_t id = 0;
  double learning_rate = 0;
  double weight_decay = 0;
};
static_assert(sizeof(Image) == 32);

void check_number(const char* op, const char* name, double number) {
  TORCH_CHECK_VALUE(
      std::isfinite(number) && number >= 0,
      op,
      ": expected a ",
      name,
      " that is finite and not negative, but got ",
      number);
}

} // namespace

RuleSpec make_rule(
    const char* op,
    const std::string& optimizer,
    double learning_rate,
    double weight_decay) {
  TORCH_CHECK_VALUE(
      optimizer == "sgd",
      op,
      ": expected an optimizer out of 'sgd', but got '",
      optimizer,
      "'");
  RuleSpec rule;
  rule.id = RuleSpec::Id::kSgd;
  rule.learning_rate = learning_rate;
  rule.weight_decay = weight_decay;
  return rule;
}

void check_rule(const char* op, const RuleSpec& rule) {
  check_number(op, "learning rate", rule.learning_rate);
  check_number(op, "weight decay", rule.weight_decay);
}

std::optional<at::Tensor> serialize_rule(const RuleSpec& rule) {
  if (rule.id == RuleSpec::Id::kAssign) {
    return std::nullopt;
  }
  Image image;
  image.id = static_cast<uint64_t>(rule.id);
  image.learning_rate = rule.learning_rate;
  image.weight_decay = rule.weight_decay;
  const PlainDispatch plain;
  at::Tensor bytes = at::empty({sizeof(Image)}, at::kByte);
  std::memcpy(bytes.mutable_data_ptr(), &image, sizeof(Image));
  return bytes;
}

std::optional<RuleSpec> load_rule(const at::Tensor& bytes) {
  Image image;
  const auto num_bytes = bytes.nbytes();
  if (!bytes.device().is_cpu() || bytes.scalar_type() != at::kByte ||
      !bytes.is_contiguous() || num_bytes < sizeof(image.magic) ||
      std::memcmp(bytes.const_data_ptr(), image.magic, sizeof(image.magic)) !=
          0) {
    return std::nullopt;
  }
  TORCH_CHECK_VALUE(
      num_bytes == sizeof(Image),
      "load: expected an optimizer of ",
      sizeof(Image),
      " bytes, but got ",
      num_bytes);
  std::memcpy(&image, bytes.const_data_ptr(), sizeof(Image));
  TORCH_CHECK_VALUE(
      image.id == static_cast<uint64_t>(RuleSpec::Id::kSgd),
      "load: expected an optimizer that this version knows, but got number ",
      image.id,
      "; a newer torchkv may read it");
  RuleSpec rule;
  rule.id = RuleSpec::Id::kSgd;
  rule.learning_rate = image.learning_rate;
  rule.weight_decay = image.weight_decay;
  check_rule("load", rule);
  return rule;
}

} // namespace torchkv
