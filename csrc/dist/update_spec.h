#pragma once

#include <cstdint>
#include <memory>

#include "../core/export.h"
#include "../update/updater.h"
#include "protocol/blob.h"

namespace torchkv::dist {

// How the servers merge pushes: what rank 0 sends for each generation of the
// protocol. Names and numbers, or an archive of TorchScript; never pickle.
struct UpdateSpec {
  enum class Kind : uint8_t {
    kAssign,
    kOptimizer,
    kScript,
    kPython,
  };
  Kind kind = Kind::kAssign;
  // Rank 0's pushes become the value, and the optimizer's state is kept.
  bool replaces = false;
  // Counts the calls that dropped the optimizers' state. Two specs of one epoch
  // are one optimizer with other hyperparameters.
  int64_t epoch = 0;
  // How often the rank that sends this has set an updater or hyperparameters,
  // and a hash of what it has set: of all ranks that make the same calls.
  int64_t num_calls = 0;
  uint64_t history = 0;
  OptimizerPtr optimizer; // kOptimizer
  at::Tensor archive; // kScript: OpaqueUpdater::serialize
};

// The spec's history after a rank whose latest spec is `before` has set it. The
// code of an updater does not count.
TORCHKV_API uint64_t
history_after(const UpdateSpec& before, const UpdateSpec& spec);

TORCHKV_API Blob encode(const UpdateSpec& spec);
// An empty blob is ASSIGN. ValueError for anything that encode has not made.
// An optimizer's generation is the spec's epoch.
TORCHKV_API UpdateSpec decode_update_spec(const Blob& bytes);

} // namespace torchkv::dist
