#pragma once

#include <exception>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <unordered_set>
#include <utility>
#include <vector>

#include "../device/runtime.h"
#include "../device/work.h"
#include "../memory/entry.h"
#include "../store/arguments.h"
#include "buffers.h"
#include "caller_values.h"
#include "list_plan.h"
#include "session.h"

namespace torchkv::dist {

class DeviceCopies;

// Where the values that a call pulls go.
struct Outs {
  using TensorsOfKey = c10::SmallVector<at::Tensor, 1>;

  Keys keys; // distinct
  std::vector<TensorsOfKey> tensors; // of each key
  std::vector<Meta> metas;
  ListPlanPtr plan; // of these keys; null: none travel together
  // If not empty, the usual outs (check_outs) of the plan's lists, in their
  // order, and the above have those of the other keys only.
  std::vector<at::Tensor> listed;

  // The numbers of keys that travel alone.
  size_t num_singles() const {
    return plan == nullptr ? keys.list.size() : plan->rest.size();
  }
  size_t single(size_t i) const {
    return plan == nullptr || !listed.empty() ? i : plan->rest[i];
  }
};
Outs outs_of(
    const Call& call,
    const Entries& entries,
    ListPlanPtr plan,
    bool are_usual);

// The end of a call: its error, or its values in the outs, which whichever
// thread asks first writes, once. Thread-safe.
class Receipt final : public Completion,
                      public std::enable_shared_from_this<Receipt> {
 public:
  // Of a call of `op` on this rank, which `pending` ends within `timeout`
  // seconds. The runtime outlives it.
  Receipt(
      Runtime& runtime,
      const char* op,
      PendingPtr pending,
      Outs outs,
      std::shared_ptr<Session> session,
      int64_t rank,
      double timeout);

  void wait() override {
    wait(nullptr);
  }
  // Without writing the outs that the update of these values has written.
  void wait(const CallerValues::OfCall* values);
  bool is_completed() override;
  void then(std::function<void(std::exception_ptr)> done) override;

 private:
  bool has_outs() const {
    return !outs_.tensors.empty() || !outs_.listed.empty();
  }
  void write(const Return& result, const CallerValues::OfCall* values);
  void write_lists(const std::vector<SliceResult>& results) const;
  void write_key(
      kernels::cpu::CopyBatch& batch,
      DeviceCopies& copies,
      c10::ArrayRef<Blob> pieces,
      const Meta& meta,
      c10::ArrayRef<at::Tensor> outs,
      const std::unordered_set<const void*>& in_outs) const;

  Runtime& runtime_;
  const std::string op_;
  const PendingPtr pending_;
  std::mutex mutex_; // guards the next two
  Outs outs_;
  // The work on accelerators before the call, after which outs may be written,
  // by whichever thread waits.
  std::vector<std::pair<c10::Device, std::unique_ptr<RuntimeEvent>>> before_;
  const std::shared_ptr<Session> session_;
  const int64_t rank_;
  const double timeout_;
  const Buffers buffers_;
};

} // namespace torchkv::dist
