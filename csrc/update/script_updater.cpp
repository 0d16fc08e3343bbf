#include "script_updater.h"

#include <ATen/core/function_schema.h>
#include <ATen/ops/empty.h>
#include <c10/core/InferenceMode.h>
#include <torch/csrc/jit/serialization/import.h>

#include <algorithm>
#include <cstring>
#include <sstream>
#include <utility>

#include "../core/errors.h"
#include "../core/plain_dispatch.h"
#include "../memory/layout.h"
#include "script_archives.h"

namespace torchkv {
namespace {

// A file of the archive of an updater that takes rows.
constexpr const char* kTakesRows = "torchkv_takes_rows";

[[noreturn]] void refuse(const std::string& what) {
  TORCH_CHECK_TYPE(
      false,
      "set_updater: expected a TorchScript updater of signature ",
      expected_signature(KeyKind::kInt),
      " (or key: str), but got ",
      what);
}

torch::jit::Method find_forward(const torch::jit::Module& module) {
  const auto method = module.find_method("forward");
  if (!method) {
    refuse("a module without a forward method");
  }
  return *method;
}

// The kind of keys that the function takes; throws for other signatures.
std::optional<KeyKind> check_signature(const c10::FunctionSchema& schema) {
  std::ostringstream signature;
  signature << schema;
  const auto& arguments = schema.arguments(); // [0] is self
  size_t required = 0;
  for (const auto& argument : arguments) {
    required += argument.default_value() ? 0 : 1;
  }
  if (arguments.size() < 4 || required > 4) {
    refuse(signature.str());
  }
  for (const size_t i : {2, 3}) {
    if (!c10::TensorType::get()->isSubtypeOf(*arguments[i].type())) {
      refuse(signature.str());
    }
  }
  const auto& key = arguments[1].type();
  const bool takes_int = c10::IntType::get()->isSubtypeOf(*key);
  const bool takes_str = c10::StringType::get()->isSubtypeOf(*key);
  if (takes_int && takes_str) {
    return std::nullopt;
  }
  if (!takes_int && !takes_str) {
    refuse(signature.str());
  }
  return takes_int ? KeyKind::kInt : KeyKind::kStr;
}

// What an updater has returned, at any depth.
Returned what_is_in(const c10::IValue& value, const at::Tensor& stored) {
  if (value.isTensor()) {
    return what_is(value.toTensor(), stored);
  }
  Returned result = Returned::kNoTensor;
  const auto add = [&](const c10::IValue& item) {
    result = std::max(result, what_is_in(item, stored));
  };
  if (value.isTuple()) {
    for (const auto& item : value.toTupleRef().elements()) {
      add(item);
    }
  } else if (value.isList()) {
    for (const c10::IValue& item : value.toList()) {
      add(item);
    }
  } else if (value.isGenericDict()) {
    for (const auto& item : value.toGenericDict()) {
      add(item.value());
    }
  }
  return result;
}

// A module whose forward is the function. A function alone cannot be saved, nor
// held like a module.
torch::jit::Module wrap(const torch::jit::StrongFunctionPtr& function) {
  const c10::QualifiedName name("__torch__.torchkv.FunctionUpdater");
  torch::jit::Module module(name);
  module.register_attribute("training", c10::BoolType::get(), true);
  const auto graph =
      torch::jit::toGraphFunction(*function.function_).graph()->copy();
  graph->insertInput(0, "self")->setType(module._ivalue()->type());
  auto* method = module._ivalue()->compilation_unit()->create_function(
      c10::QualifiedName(name, "forward"), graph);
  module.type()->addMethod(method);
  return module;
}

} // namespace

ScriptUpdater::ScriptUpdater(
    torch::jit::Module module,
    const void* object,
    bool takes_rows)
    : OpaqueUpdater(object, takes_rows),
      module_(std::move(module)),
      forward_(find_forward(module_)),
      key_kind_(check_signature(forward_.function().getSchema())) {}

ScriptUpdater::ScriptUpdater(const torch::jit::Module& module, bool takes_rows)
    : ScriptUpdater(module, module._ivalue().get(), takes_rows) {}

ScriptUpdater::ScriptUpdater(
    const torch::jit::StrongFunctionPtr& function,
    bool takes_rows)
    : ScriptUpdater(wrap(function), function.function_, takes_rows) {
  function_owner_ = function.cu_;
}

void ScriptUpdater::update(
    const Key& key,
    const at::Tensor& input,
    const at::Tensor& stored) {
  const c10::IValue returned = forward_({to_ivalue(key), input, stored});
  check_returned(key, what_is_in(returned, stored), stored);
}

at::Tensor ScriptUpdater::serialize() const {
  const c10::InferenceMode normal_tensors(false);
  const PlainDispatch plain;
  std::ostringstream stream;
  torch::jit::ExtraFilesMap extra;
  if (takes_rows()) {
    extra[kTakesRows] = "1";
  }
  module_.save(stream, extra);
  const std::string bytes = stream.str();
  at::Tensor result = at::empty(
      {static_cast<int64_t>(bytes.size())},
      at::TensorOptions().dtype(at::kByte));
  std::memcpy(result.mutable_data_ptr(), bytes.data(), bytes.size());
  return result;
}

std::shared_ptr<ScriptUpdater> ScriptUpdater::load(const at::Tensor& bytes) {
  TORCH_CHECK_VALUE(
      bytes.layout() == at::kStrided && bytes.scalar_type() == at::kByte &&
          bytes.dim() == 1 &&
          needed_storage_bytes(bytes) <= bytes.storage().nbytes(),
      "load: expected the updater as a vector of bytes, but got ",
      bytes.scalar_type(),
      " of shape ",
      bytes.sizes());
  // The state must not become inference tensors, or wrappers of a caller's
  // mode.
  const c10::InferenceMode normal_tensors(false);
  const PlainDispatch plain;
  const auto archives = unpack_archives(bytes.cpu());
  TORCH_CHECK_VALUE(
      archives.size() == 1,
      "load: expected a store of several processes, as many as have saved it, ",
      archives.size(),
      ": the updater has a state of its own in each of them");
  const at::Tensor flat = archives[0].contiguous();
  std::istringstream stream(
      std::string(
          static_cast<const char*>(flat.const_data_ptr()),
          static_cast<size_t>(flat.numel())));
  torch::jit::ExtraFilesMap extra{{kTakesRows, ""}}; // to read
  const torch::jit::Module module =
      torch::jit::load(stream, std::nullopt, extra);
  return std::make_shared<ScriptUpdater>(module, !extra[kTakesRows].empty());
}

} // namespace torchkv
