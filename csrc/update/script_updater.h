#pragma once

#include <torch/csrc/jit/api/compilation_unit.h>
#include <torch/csrc/jit/api/module.h>

#include <memory>
#include <optional>
#include <string>

#include "../core/export.h"
#include "updater.h"

namespace torchkv {

inline c10::IValue to_ivalue(const Key& key) {
  return key.kind() == KeyKind::kInt ? c10::IValue(key.id()) : key.text();
}

// A TorchScript module, or a function wrapped into one, as an updater. It runs
// without Python and without the GIL. A module keeps its state (a Dict[int,
// Tensor] of momentum, say), which is saved with the store and shared with
// other owners of the module.
class TORCHKV_API ScriptUpdater final : public OpaqueUpdater {
 public:
  // Throws TypeError, with the expected signature, where `forward` does not
  // take (key: int or str, input: Tensor, stored: Tensor).
  explicit ScriptUpdater(
      const torch::jit::Module& module,
      bool takes_rows = false);
  explicit ScriptUpdater(
      const torch::jit::StrongFunctionPtr& function,
      bool takes_rows = false);
  // From serialize().
  static std::shared_ptr<ScriptUpdater> load(const at::Tensor& bytes);

  void update(const Key& key, const at::Tensor& input, const at::Tensor& stored)
      override;
  std::optional<KeyKind> key_kind() const override {
    return key_kind_;
  }
  at::Tensor serialize() const override;

 private:
  ScriptUpdater(torch::jit::Module module, const void* object, bool takes_rows);

  // Keeps a function's code alive; a module owns its own.
  std::shared_ptr<torch::jit::CompilationUnit> function_owner_;
  torch::jit::Module module_;
  torch::jit::Method forward_;
  std::optional<KeyKind> key_kind_; // none: `key: Any`
};

} // namespace torchkv
