#pragma once

#include <c10/core/Stream.h>

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "clock.h"

// CUDA graphs of the fake devices. What is enqueued on a stream while that is
// captured is not done but recorded, and a replay does it on another stream,
// with the contents that the memory has then. A stream that waits for an event
// of a capture takes part in it. While any stream is captured the host may not
// wait for a device, nor ask what it has done (cudaStreamCaptureModeGlobal).
//
// What is allocated in a capture is the graph's until that is gone; none of it
// is used twice.
namespace torchkv::mock_cuda {

// What is done on a stream, whichever it is.
using StreamWork = std::function<void(c10::Stream)>;

class Graph {
 public:
  Graph() = default;
  ~Graph();
  Graph(const Graph&) = delete;
  Graph& operator=(const Graph&) = delete;
  Graph(Graph&&) = delete;
  Graph& operator=(Graph&&) = delete;

  // All that was recorded, as work of `stream`, after the replays before. Each
  // access is checked as if it had not been recorded. Any stream that took part
  // in the capture is one of the graph's own here.
  void replay(c10::Stream stream);

 private:
  friend class Capture;

  struct Node {
    size_t branch;
    StreamWork work;
  };
  std::vector<c10::Stream> branches_; // the first one stands for replay's
  std::vector<Node> nodes_;
  std::vector<void*> memory_;
  Clock last_replay_;
};

// `stream` is captured from now on. Throws c10::Error for a default stream.
void begin_capture(c10::Stream stream);

// Throws c10::Error where there was a mistake in the capture, or where a stream
// that takes part has work that `stream` does not wait for.
// REQUIRES: the stream that the capture began on.
std::unique_ptr<Graph> end_capture(c10::Stream stream);

// REQUIRES for all below: mutex().

// Does the work, or adds it to the capture of the stream.
void carry_out(c10::Stream stream, const StreamWork& work);

// Throws c10::Error where any stream is captured: `call` of the host is not
// allowed then.
void check_not_capturing(const char* call);

// One that has not ended; or has, for those who still know it.
class Capture {
 public:
  // What an event stands for that was recorded in a capture.
  struct Point {
    std::shared_ptr<Capture> capture; // null: recorded in none
    Clock before; // works of the capture
    std::shared_ptr<Clock> replayed; // in the last replay
  };

  explicit Capture(c10::Stream origin);

  void add(c10::Stream stream, StreamWork work);
  static Point record(c10::Stream stream);
  // Throws c10::Error where one of the two is in another capture than the
  // other.
  static void wait(c10::Stream stream, const Point& point);
  // For the graph.
  void keep(void* memory);
  // Makes the end of the capture fail.
  void fail(const std::string& mistake);
  std::unique_ptr<Graph> end(c10::Stream origin);

 private:
  // Makes the stream take part.
  size_t branch_of(c10::Stream stream);

  std::vector<c10::Stream> streams_;
  std::vector<Clock> known_; // by each of them, of works of the capture
  std::unique_ptr<Graph> graph_ = std::make_unique<Graph>(); // null: ended
  std::string mistake_;
};

} // namespace torchkv::mock_cuda
