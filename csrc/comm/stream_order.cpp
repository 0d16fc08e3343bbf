#include "stream_order.h"

#include <c10/util/Exception.h>

#include <algorithm>
#include <utility>

#include "../errors.h"

namespace torchkv {

std::shared_ptr<RuntimeEvent> EventPool::get(c10::Device device) {
  const auto index = static_cast<size_t>(std::max<int>(device.index(), 0));
  std::unique_ptr<RuntimeEvent> event;
  {
    const std::lock_guard lock(state_->mutex);
    auto& free = state_->free;
    if (free.size() <= index) {
      free.resize(index + 1);
    }
    if (!free[index].empty()) {
      event = std::move(free[index].back());
      free[index].pop_back();
    }
  }
  if (event == nullptr) {
    event = state_->runtime.make_event(device);
  }
  return {event.release(), [state = state_, index](RuntimeEvent* done) {
            std::unique_ptr<RuntimeEvent> owned(done);
            const std::lock_guard lock(state->mutex);
            state->free[index].push_back(std::move(owned));
          }};
}

StreamOrder::Home& StreamOrder::home_of(c10::Device device) {
  auto* home =
      std::find_if(homes_.begin(), homes_.end(), [&](const Home& candidate) {
        return candidate.device == device;
      });
  if (home != homes_.end()) {
    return *home;
  }
  const c10::Stream stream = runtime_.current_stream(device);
  const bool is_capturing = runtime_.is_capturing(stream);
  homes_.push_back(
      {device,
       stream,
       is_capturing,
       is_capturing ? nullptr : events_.get(device),
       {}});
  return homes_.back();
}

void StreamOrder::enter(Slice& slice) {
  if (slice.home.is_cpu()) {
    return;
  }
  if (guard_.current_device() != slice.home) {
    guard_.reset_device(slice.home);
  }
  Home& home = home_of(slice.home);
  if (home.is_capturing) {
    return;
  }
  Timeline& timeline = slice.timeline;
  if (timeline.event != nullptr && timeline.stream != home.stream) {
    runtime_.wait(*timeline.event, home.stream);
    const auto keep = [&](const at::Tensor& tensor) {
      if (tensor.defined()) {
        runtime_.keep_until_done(tensor, home.stream);
      }
    };
    keep(slice.value);
    keep(slice.merge_buffer);
    keep(slice.master);
    keep(slice.accumulated);
    for (const auto& state : slice.states) {
      keep(state);
    }
  }
  timeline.stream = home.stream;
  timeline.event = home.done;
}

void StreamOrder::use(c10::Device home_device, c10::Device device) {
  if (device == home_device || device.is_cpu()) {
    return;
  }
  Home& home = home_of(home_device);
  const c10::Stream other = runtime_.current_stream(device);
  if (std::find(home.others.begin(), home.others.end(), other) !=
      home.others.end()) {
    return;
  }
  const auto event = events_.get(device);
  runtime_.record(*event, other);
  runtime_.wait(*event, home.stream);
  home.others.push_back(other);
}

c10::Stream StreamOrder::stream(c10::Device home) {
  return home_of(home).stream;
}

void StreamOrder::end() {
  for (auto& home : homes_) {
    if (home.is_capturing && home.others.empty()) {
      continue;
    }
    if (home.done == nullptr) {
      home.done = events_.get(home.device);
    }
    runtime_.record(*home.done, home.stream);
    for (const auto& other : home.others) {
      runtime_.wait(*home.done, other);
    }
  }
}

StreamOrder::~StreamOrder() {
  try {
    end();
  } catch (const c10::Error&) { // NOLINT(bugprone-empty-catch)
    // Recording an event fails only after the device itself has, and every
    // later call on it reports that.
  }
}

} // namespace torchkv
