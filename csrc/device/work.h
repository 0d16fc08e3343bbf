#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/ivalue.h>
#include <c10/core/Stream.h>
#include <c10/util/SmallVector.h>
#include <c10/util/intrusive_ptr.h>

#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "../core/export.h"
#include "runtime.h"

namespace torchkv {

// What an asynchronous call has enqueued on its store's streams, as c10d's
// Work. Until wait() the caller must not overwrite what was pushed, nor use the
// outs, but may free both. On the CPU all is done when the call returns, and
// there is nothing to wait for.
//
// Thread safety: any thread may call any method at any time.
class TORCHKV_API Work final : public torch::CustomClassHolder {
 public:
  // What is enqueued on one accelerator.
  struct Part {
    c10::Stream caller; // that was the current one at the call
    c10::Stream comm; // the store's
    std::shared_ptr<RuntimeEvent> done; // recorded there
    bool is_captured; // into a graph, instead of being done
  };
  using Parts = c10::SmallVector<Part, 1>;

  // Holds the tensors until wait(). They are on the parts' devices. The runtime
  // outlives the work.
  Work(Runtime& runtime, Parts parts, std::vector<at::Tensor> tensors);
  // The work goes on; memory that is freed by this is used again only after it.
  ~Work() override;
  Work(const Work&) = delete;
  Work& operator=(const Work&) = delete;
  Work(Work&&) = delete;
  Work& operator=(Work&&) = delete;

  // What the calling thread enqueues on its current streams from now on runs
  // after the work. Does not block the host. May be repeated, on other streams,
  // too.
  void wait();

  // Whether all is done. Does not block the host. False for work that was
  // captured into a graph.
  bool is_completed() const;

  // "Work(is_completed=True)"
  std::string repr() const;

 private:
  const Part& part_on(c10::Device device) const;

  // Constant after construction.
  Runtime& runtime_;
  const Parts parts_;
  const uint64_t num_forks_; // before it was made

  std::mutex mutex_; // guards tensors_
  std::vector<at::Tensor> tensors_;
};

using WorkPtr = c10::intrusive_ptr<Work>;

} // namespace torchkv
