#include "graph.h"

#include <c10/util/Exception.h>

#include <algorithm>
#include <mutex>
#include <utility>

#include "devices.h"
#include "memory.h"

namespace torchkv::mock_cuda {
namespace {

std::vector<std::shared_ptr<Capture>>& captures() {
  static auto* captures = new std::vector<std::shared_ptr<Capture>>();
  return *captures;
}

} // namespace

Graph::~Graph() {
  const std::lock_guard lock(mutex());
  for (void* memory : memory_) {
    release(memory);
  }
}

void Graph::replay(c10::Stream stream) {
  const std::lock_guard lock(mutex());
  TORCH_CHECK(
      stream.device() == branches_[0].device(),
      "mock_cuda: a graph of ",
      branches_[0].device(),
      " was replayed on ",
      place_of(stream));
  branches_[0] = stream;
  wait_for(stream, last_replay_); // as CUDA does with each cudaGraphExec_t
  for (const auto& node : nodes_) {
    node.work(branches_[node.branch]);
  }
  last_replay_ = now_of(stream);
}

Capture::Capture(c10::Stream origin) {
  streams_.push_back(origin);
  known_.emplace_back();
  graph_->branches_.push_back(origin);
}

size_t Capture::branch_of(c10::Stream stream) {
  const auto it = std::find(streams_.begin(), streams_.end(), stream);
  if (it != streams_.end()) {
    return static_cast<size_t>(it - streams_.begin());
  }
  streams_.push_back(stream);
  known_.emplace_back();
  graph_->branches_.push_back(private_stream(stream.device()));
  return streams_.size() - 1;
}

void Capture::add(c10::Stream stream, StreamWork work) {
  const size_t branch = branch_of(stream);
  known_[branch].tick(branch);
  graph_->nodes_.push_back({branch, std::move(work)});
}

Capture::Point Capture::record(c10::Stream stream) {
  const auto& capture = capture_of(stream);
  const size_t branch = capture->branch_of(stream);
  const auto replayed = std::make_shared<Clock>();
  capture->graph_->nodes_.push_back(
      {branch, [replayed](c10::Stream on) { *replayed = now_of(on); }});
  return {capture, capture->known_[branch], replayed};
}

void Capture::wait(c10::Stream stream, const Point& point) {
  auto& capture = capture_of(stream);
  const auto refuse = [&](const char* what) {
    const std::string mistake =
        c10::str("mock_cuda: ", place_of(stream), " waits for ", what);
    for (const auto& failed : {capture, point.capture}) {
      if (failed != nullptr) {
        failed->fail(mistake);
      }
    }
    TORCH_CHECK(false, mistake);
  };
  if (point.capture == nullptr) {
    refuse("an event from outside of its capture");
  }
  if (point.capture->graph_ == nullptr) {
    refuse("an event of a capture that has ended");
  }
  if (capture != nullptr && capture != point.capture) {
    refuse("an event of another capture");
  }
  if (stream.id() == 0) {
    refuse("an event of a capture, which default streams cannot join");
  }
  capture = point.capture;
  const size_t branch = capture->branch_of(stream);
  capture->known_[branch].join(point.before);
  capture->graph_->nodes_.push_back(
      {branch, [replayed = point.replayed](c10::Stream on) {
         wait_for(on, *replayed);
       }});
}

void Capture::keep(void* memory) {
  graph_->memory_.push_back(memory);
}

void Capture::fail(const std::string& mistake) {
  if (mistake_.empty()) {
    mistake_ = mistake;
  }
}

std::unique_ptr<Graph> Capture::end(c10::Stream origin) {
  TORCH_CHECK(
      origin == streams_[0],
      "mock_cuda: a capture that began on ",
      place_of(streams_[0]),
      " ends on ",
      place_of(origin));
  auto graph = std::exchange(graph_, nullptr);
  auto& all = captures();
  all.erase(std::find_if(all.begin(), all.end(), [&](const auto& capture) {
    return capture.get() == this;
  }));
  for (const auto& stream : streams_) {
    capture_of(stream) = nullptr;
  }
  TORCH_CHECK(mistake_.empty(), mistake_);
  for (size_t i = 0; i < streams_.size(); ++i) {
    TORCH_CHECK(
        known_[0].covers(known_[i]),
        "mock_cuda: a capture ends with work of ",
        place_of(streams_[i]),
        " that ",
        place_of(origin),
        " does not wait for");
  }
  return graph;
}

void begin_capture(c10::Stream stream) {
  const std::lock_guard lock(mutex());
  TORCH_CHECK(
      stream.id() != 0, "mock_cuda: a default stream cannot be captured");
  auto& capture = capture_of(stream);
  TORCH_CHECK(
      capture == nullptr, "mock_cuda: ", place_of(stream), " is captured");
  capture = std::make_shared<Capture>(stream);
  captures().push_back(capture);
}

std::unique_ptr<Graph> end_capture(c10::Stream stream) {
  const std::lock_guard lock(mutex());
  const auto capture = capture_of(stream);
  TORCH_CHECK(
      capture != nullptr, "mock_cuda: ", place_of(stream), " is not captured");
  return capture->end(stream);
}

void carry_out(c10::Stream stream, const StreamWork& work) {
  const auto& capture = capture_of(stream);
  if (capture != nullptr) {
    capture->add(stream, work);
  } else {
    work(stream);
  }
}

int& capture_mode() {
  thread_local int mode = 0;
  return mode;
}

void check_not_capturing(const char* call) {
  if (capture_mode() == kRelaxed) {
    return;
  }
  const auto mistake =
      c10::str("mock_cuda: ", call, " while a stream is captured");
  for (const auto& capture : captures()) {
    capture->fail(mistake);
  }
  TORCH_CHECK(captures().empty(), mistake);
}

} // namespace torchkv::mock_cuda
