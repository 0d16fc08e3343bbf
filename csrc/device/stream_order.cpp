#include "stream_order.h"

#include <c10/util/Exception.h>

#include <algorithm>
#include <utility>

#include "../core/errors.h"

namespace torchkv {

c10::Stream StreamOrder::stream_of_caller(c10::Device device) {
  return hidden_ && hidden_->device() == device
      ? *hidden_
      : runtime_.current_stream(device);
}

StreamOrder::Home& StreamOrder::home_of(const Place& place) {
  auto* home =
      std::find_if(homes_.begin(), homes_.end(), [&](const Home& candidate) {
        return candidate.place == place;
      });
  if (home != homes_.end()) {
    return *home;
  }
  const c10::Stream caller = stream_of_caller(place.device);
  const bool is_capturing = runtime_.is_capturing(caller);
  homes_.push_back(
      {place,
       caller,
       place.index < 0 ? caller : streams_.of(place),
       is_capturing,
       is_capturing ? nullptr : streams_.event(place.device),
       {},
       0});
  return homes_.back();
}

void StreamOrder::show_callers_stream() {
  current_ = SIZE_MAX;
  if (hidden_) {
    stream_.reset();
    hidden_.reset();
  }
}

void StreamOrder::make_current(const Home& home) {
  if (home.place.index >= 0) {
    if (stream_.current_stream() != home.stream) {
      stream_.reset_stream(home.stream);
      hidden_ = home.caller;
    }
  } else {
    show_callers_stream();
    if (device_.current_device() != home.place.device) {
      device_.reset_device(home.place.device);
    }
  }
  current_ = static_cast<size_t>(&home - homes_.begin());
}

bool StreamOrder::enter_anew(const Place& place, Timeline* timeline) {
  if (place.device.is_cpu()) {
    // Copies between accelerators and the CPU run on the caller's stream.
    show_callers_stream();
    return false;
  }
  if (current_ >= homes_.size() || homes_[current_].place != place) {
    make_current(home_of(place));
  }
  const Home& home = homes_[current_];
  if (timeline == nullptr || home.is_capturing ||
      timeline->event == home.done) {
    return false;
  }
  const bool moves =
      timeline->event != nullptr && timeline->stream != home.stream;
  if (moves) {
    runtime_.wait(*timeline->event, home.stream);
  }
  timeline->stream = home.stream;
  timeline->event = home.done;
  return moves;
}

void StreamOrder::use_other(const Place& place, c10::Device device) {
  Home& home = home_of(place);
  const c10::Stream other = stream_of_caller(device);
  if (other == home.stream ||
      std::find(home.others.begin(), home.others.end(), other) !=
          home.others.end()) {
    return;
  }
  TORCH_CHECK(
      runtime_.is_capturing(other) == home.is_capturing,
      "expected the current streams of ",
      place.device,
      " and ",
      device,
      " to be captured into one CUDA graph, or neither of them");
  home.others.push_back(other);
  if (home.is_capturing) {
    sync(); // a stream that waits for a captured one is captured, too, and
            // later allocations there belong to the graph
  }
}

// The event of a caller's stream: all work enqueued before this call.
const StreamOrder::Source& StreamOrder::source_of(c10::Stream caller) {
  for (const auto& known : callers_) {
    if (known.stream == caller) {
      return known;
    }
  }
  callers_.push_back({caller, streams_.event(caller.device())});
  runtime_.record(*callers_.back().event, caller);
  return callers_.back();
}

// Directly or, if that takes fewer waits, through one of the streams: this hub
// waits for all others, and then they wait for it.
void StreamOrder::wait_all(c10::ArrayRef<Wait> waits) {
  c10::SmallVector<const Source*, 8> sources;
  c10::SmallVector<c10::Stream, 8> targets;
  for (const auto& wait : waits) {
    if (std::find(sources.begin(), sources.end(), wait.source) ==
        sources.end()) {
      sources.push_back(wait.source);
    }
    if (std::find(targets.begin(), targets.end(), wait.stream) ==
        targets.end()) {
      targets.push_back(wait.stream);
    }
  }
  const auto* const hub =
      std::find_if(targets.begin(), targets.end(), [&](c10::Stream target) {
        return std::any_of(
            sources.begin(), sources.end(), [&](const Source* source) {
              return source->stream == target;
            });
      });
  // Waits cost nothing in a graph, and these may be streams of several graphs.
  const bool is_capturing =
      std::any_of(homes_.begin(), homes_.end(), [](const Home& home) {
        return home.is_capturing;
      });
  if (is_capturing || hub == targets.end() ||
      sources.size() + targets.size() - 2 >= waits.size()) {
    for (const auto& wait : waits) {
      runtime_.wait(*wait.source->event, wait.stream);
    }
    return;
  }
  for (const auto* source : sources) {
    if (source->stream != *hub) {
      runtime_.wait(*source->event, *hub);
    }
  }
  const auto event = streams_.event(hub->device());
  runtime_.record(*event, *hub);
  for (const auto& target : targets) {
    if (target != *hub) {
      runtime_.wait(*event, target);
    }
  }
}

void StreamOrder::sync() {
  // Record all events first: an event recorded after a wait includes that wait.
  c10::SmallVector<Wait, 8> waits;
  for (auto& home : homes_) {
    for (; home.num_synced < home.others.size(); ++home.num_synced) {
      waits.push_back({&source_of(home.others[home.num_synced]), home.stream});
    }
  }
  if (!waits.empty()) {
    wait_all(waits);
  }
}

void StreamOrder::end() {
  std::list<Source> done; // of the homes
  c10::SmallVector<Wait, 8> waits;
  for (auto& home : homes_) {
    if (home.is_capturing && home.num_synced == 0) {
      continue;
    }
    if (home.done == nullptr) {
      home.done = streams_.event(home.place.device);
    }
    runtime_.record(*home.done, home.stream);
    done.push_back({home.stream, home.done});
    for (size_t i = 0; i < home.num_synced; ++i) {
      waits.push_back({&done.back(), home.others[i]});
    }
  }
  if (!waits.empty()) {
    wait_all(waits);
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
