#include "work.h"

#include <c10/util/Exception.h>
#include <c10/util/StringUtil.h>

#include <algorithm>
#include <utility>

#include "../core/process.h"

namespace torchkv {

Work::Work(Runtime& runtime, Parts parts, std::vector<at::Tensor> tensors)
    : runtime_(runtime),
      parts_(std::move(parts)),
      num_forks_(fork_count()),
      tensors_(std::move(tensors)) {}

Work::Work(Runtime& runtime, std::shared_ptr<Completion> completion)
    : runtime_(runtime),
      completion_(std::move(completion)),
      num_forks_(fork_count()) {}

Work::~Work() {
  if (num_forks_ != fork_count()) {
    return; // the work, and the memory on devices, are the parent's
  }
  try {
    for (const auto& tensor : tensors_) {
      runtime_.keep_until_done(tensor, part_on(tensor.device()).comm);
    }
  } catch (const c10::Error&) { // NOLINT(bugprone-empty-catch)
    // As in StreamOrder.
  }
}

const Work::Part& Work::part_on(c10::Device device) const {
  return *std::find_if(parts_.begin(), parts_.end(), [&](const Part& part) {
    return part.comm.device() == device;
  });
}

void Work::wait() {
  if (completion_ != nullptr) {
    completion_->wait();
  }
  for (const auto& part : parts_) {
    runtime_.wait(*part.done, runtime_.current_stream(part.comm.device()));
  }
  std::vector<at::Tensor> tensors; // freed after the lock is released
  {
    const std::lock_guard lock(mutex_);
    tensors.swap(tensors_);
  }
  for (const auto& tensor : tensors) {
    // Its memory belongs to the calling stream, which may not have waited.
    const Part& part = part_on(tensor.device());
    if (runtime_.current_stream(tensor.device()) != part.caller) {
      runtime_.keep_until_done(tensor, part.comm);
    }
  }
}

bool Work::is_completed() const {
  if (completion_ != nullptr && !completion_->is_completed()) {
    return false;
  }
  return std::all_of(parts_.begin(), parts_.end(), [&](const Part& part) {
    return !part.is_captured && runtime_.is_done(*part.done);
  });
}

std::string Work::repr() const {
  return c10::str("Work(is_completed=", is_completed() ? "True" : "False", ')');
}

} // namespace torchkv
