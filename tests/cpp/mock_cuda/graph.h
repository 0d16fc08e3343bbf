#pragma once

#include <c10/core/Stream.h>

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "clock.h"

// CUDA graphs of the fake devices. Work on a stream that is captured is
// recorded instead of executed, and a replay executes it on another stream with
// the current contents of memory. A stream that waits for an event of a capture
// joins it. While any stream is captured, the host may neither wait for a
// device, nor query it, nor pin memory (cudaStreamCaptureModeGlobal), but for
// threads in the relaxed mode.
//
// Memory allocated in a capture belongs to the graph until it is destroyed, and
// is never reused.
namespace torchkv::mock_cuda {

// Work that may run on any stream.
using StreamWork = std::function<void(c10::Stream)>;

class Graph {
 public:
  Graph() = default;
  ~Graph();
  Graph(const Graph&) = delete;
  Graph& operator=(const Graph&) = delete;
  Graph(Graph&&) = delete;
  Graph& operator=(Graph&&) = delete;

  // Runs all recorded work on `stream`, after earlier replays. Each access is
  // checked as if it had not been recorded. Other streams of the capture become
  // internal streams of the graph.
  void replay(c10::Stream stream);

 private:
  friend class Capture;

  struct Node {
    size_t branch;
    StreamWork work;
  };
  std::vector<c10::Stream> branches_; // [0] = that of replay()
  std::vector<Node> nodes_;
  std::vector<void*> memory_;
  Clock last_replay_;
};

// Starts the capture of `stream`. Throws c10::Error for a default stream.
void begin_capture(c10::Stream stream);

// Throws c10::Error if the capture is invalid, or if a captured stream has work
// that `stream` does not wait for. REQUIRES: the stream that the capture began
// on.
std::unique_ptr<Graph> end_capture(c10::Stream stream);

// The calling thread's: as for cudaThreadExchangeStreamCaptureMode.
constexpr int kRelaxed = 2;
int& capture_mode();

// REQUIRES for all below: mutex().

// Runs the work, or adds it to the capture of the stream.
void carry_out(c10::Stream stream, const StreamWork& work);

// Throws c10::Error if any stream is captured: `call` of the host is not
// allowed then, unless the thread is in the relaxed mode.
void check_not_capturing(const char* call);

// A capture, which may have ended.
class Capture {
 public:
  // An event recorded in a capture.
  struct Point {
    std::shared_ptr<Capture> capture; // null: recorded in none
    Clock before; // works of the capture
    std::shared_ptr<Clock> replayed; // in the last replay
  };

  explicit Capture(c10::Stream origin);

  void add(c10::Stream stream, StreamWork work);
  static Point record(c10::Stream stream);
  // Throws c10::Error if the two are not in the same capture.
  static void wait(c10::Stream stream, const Point& point);
  // For the graph.
  void keep(void* memory);
  // Makes the end of the capture fail.
  void fail(const std::string& mistake);
  std::unique_ptr<Graph> end(c10::Stream origin);

 private:
  // Adds the stream to the capture.
  size_t branch_of(c10::Stream stream);

  std::vector<c10::Stream> streams_;
  std::vector<Clock> known_; // by each of them, of works of the capture
  std::unique_ptr<Graph> graph_ = std::make_unique<Graph>(); // null: ended
  std::string mistake_;
};

} // namespace torchkv::mock_cuda
