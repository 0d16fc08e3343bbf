#include "work.h"

#include <c10/core/StreamGuard.h>
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

c10::intrusive_ptr<c10::ivalue::Future> Work::get_future() {
  std::vector<c10::Device> devices;
  std::vector<c10::Stream> streams; // one of each device, after all work there
  for (const auto& part : parts_) {
    const auto found =
        std::find(devices.begin(), devices.end(), part.comm.device());
    if (found == devices.end()) {
      devices.push_back(part.comm.device());
      streams.push_back(part.comm);
    } else {
      runtime_.wait(*part.done, streams[found - devices.begin()]);
    }
  }
  auto future = c10::make_intrusive<c10::ivalue::Future>(
      c10::ListType::ofTensors(), std::move(devices));
  if (completion_ != nullptr) {
    completion_->then([future](std::exception_ptr error) {
      if (error != nullptr) {
        future->setError(std::move(error));
      } else {
        future->markCompleted(c10::List<at::Tensor>());
      }
    });
    return future;
  }
  c10::List<at::Tensor> tensors;
  {
    const std::lock_guard lock(mutex_);
    for (const auto& tensor : tensors_) {
      tensors.push_back(tensor);
    }
  }
  // It records events on the current streams of the value's devices.
  const c10::MultiStreamGuard guard(streams);
  future->markCompleted(std::move(tensors));
  return future;
}

std::string Work::repr() const {
  return c10::str("Work(is_completed=", is_completed() ? "True" : "False", ')');
}

} // namespace torchkv
