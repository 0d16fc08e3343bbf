#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/ivalue.h>
#include <c10/core/Stream.h>
#include <c10/util/SmallVector.h>
#include <c10/util/intrusive_ptr.h>

#include <cstdint>
#include <exception>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "../core/export.h"
#include "runtime.h"

namespace torchkv {

// What a Work waits for beside streams, such as other processes. Thread-safe.
class Completion {
 public:
  virtual ~Completion() = default;
  // Blocks; throws what has failed.
  virtual void wait() = 0;
  virtual bool is_completed() = 0;
  // Calls wait() on another thread, once it does not block, then `done` with
  // what it has thrown, or null.
  virtual void then(std::function<void(std::exception_ptr)> done) = 0;
};

// The work that an asynchronous call has enqueued on its store's streams, like
// c10d's Work. Until wait(), do not overwrite pushed tensors or use the outs;
// freeing them is safe. On the CPU the work of a store on one machine is done
// when the call returns.
//
// Thread safety: any thread may call any method at any time.
class TORCHKV_API Work final : public torch::CustomClassHolder {
 public:
  // What is enqueued on one accelerator.
  struct Part {
    c10::Stream caller; // current at the call
    c10::Stream comm; // the store's
    std::shared_ptr<RuntimeEvent> done; // recorded there
    bool is_captured; // into a CUDA graph
  };
  using Parts = c10::SmallVector<Part, 1>;

  // Holds the tensors until wait(). They are on the parts' devices. The runtime
  // outlives the work.
  Work(Runtime& runtime, Parts parts, std::vector<at::Tensor> tensors);
  // Work on the CPU that is not done when the call returns.
  Work(Runtime& runtime, std::shared_ptr<Completion> completion);
  // Does not cancel the work; memory freed by this is reused only after it.
  ~Work() override;
  Work(const Work&) = delete;
  Work& operator=(const Work&) = delete;

  // Makes the calling thread's current streams wait for the work. Does not
  // block the host, except for the work of a store on several machines, whose
  // RemoteErrors it throws. May be called again, also on other streams.
  void wait();

  // Whether the work is done. Does not block the host. False for work that was
  // captured into a graph.
  bool is_completed() const;

  // As c10d's Work::getFuture: completed, perhaps with an error, when the work
  // is done and the outs are written, and callbacks then run on another thread;
  // on accelerators completed at once, with the call's tensors there as its
  // value (none after wait()): the current streams of who asks for it wait.
  c10::intrusive_ptr<c10::ivalue::Future> get_future();

  // "Work(is_completed=True)"
  std::string repr() const;

 private:
  const Part& part_on(c10::Device device) const;

  // Constant after construction.
  Runtime& runtime_;
  const Parts parts_;
  const std::shared_ptr<Completion> completion_; // or null
  const uint64_t num_forks_; // before it was made

  std::mutex mutex_; // guards tensors_
  std::vector<at::Tensor> tensors_;
};

using WorkPtr = c10::intrusive_ptr<Work>;

} // namespace torchkv
