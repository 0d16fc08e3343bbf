#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <tuple>

#include "../../core/export.h"
#include "action.h"

namespace torchkv::dist {

// What the two cores share. A core is deterministic: it has no thread, clock,
// socket, file or random number. Its driver reports events, whose `now` never
// goes back, and carries out the actions that it then takes. Not thread-safe.
class TORCHKV_API Core {
 public:
  Core(const Core&) = delete;
  Core& operator=(const Core&) = delete;
  // What is to be done since the last take(). Messages to one peer of one frame
  // number are one Send, where the first of them was.
  Actions take();

 protected:
  Core(const Config& config, Time now) : config_(config), ticked_(now) {}

  ~Core() = default;

  // Called by take(): what is sent as late as this shares frames.
  virtual void flush() {}
  void act(Action action);
  // act(Send) of one message.
  void send(const Address& to, Message message);
  // How long this process was stopped, 0 if it was not: that silence must not
  // be blamed on the peers. Called at each on_timer.
  Time tick(Time now);
  const Config& config() const {
    return config_;
  }

 private:
  const Config config_;
  Actions out_;
  // (role, number, frame number) -> its Send in out_
  std::map<std::tuple<int, int32_t, int64_t>, size_t> frames_;
  Time ticked_; // the last on_timer
};

} // namespace torchkv::dist
