#include "core.h"

#include <algorithm>
#include <utility>

namespace torchkv::dist {
namespace {

// What may share a frame. The others are rare and small, and some are sent with
// another incarnation in their header than a frame's.
bool shares_frames(Kind kind) {
  return is_operation(kind) || kind == Kind::kGot || kind == Kind::kDone ||
      kind == Kind::kValue || kind == Kind::kWait || kind == Kind::kError;
}

} // namespace

void Core::act(Action action) {
  if (auto* send_action = std::get_if<Send>(&action)) {
    for (auto& message : send_action->frame) {
      send(send_action->to, std::move(message));
    }
    return;
  }
  out_.push_back(std::move(action));
}

void Core::send(const Address& to, Message message) {
  if (!shares_frames(message.kind)) {
    Send action{to, {}};
    action.frame.push_back(std::move(message));
    out_.emplace_back(std::move(action));
    return;
  }
  const auto [at, is_new] = frames_.try_emplace(
      {static_cast<int>(to.role), to.number, message.frame}, out_.size());
  if (is_new) {
    out_.emplace_back(Send{to, {}});
  }
  std::get<Send>(out_[at->second]).frame.push_back(std::move(message));
}

Actions Core::take() {
  flush();
  frames_.clear();
  return std::exchange(out_, {});
}

Time Core::tick(Time now) {
  const Time gap = now - ticked_;
  ticked_ = std::max(ticked_, now);
  return gap > config_.heartbeat ? gap : 0;
}

} // namespace torchkv::dist
