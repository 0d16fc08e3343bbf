#include "message.h"

#include <tuple>

namespace torchkv::dist {

const char* name(Kind kind) {
  switch (kind) {
    case Kind::kHello:
      return "HELLO";
    case Kind::kHeartbeat:
      return "HEARTBEAT";
    case Kind::kFree:
      return "FREE";
    case Kind::kBye:
      return "BYE";
    case Kind::kGot:
      return "GOT";
    case Kind::kInit:
      return "INIT";
    case Kind::kPush:
      return "PUSH";
    case Kind::kPushPull:
      return "PUSHPULL";
    case Kind::kPull:
      return "PULL";
    case Kind::kDelete:
      return "DELETE";
    case Kind::kConfig:
      return "CONFIG";
    case Kind::kEnter:
      return "ENTER";
    case Kind::kMeet:
      return "MEET";
    case Kind::kSnapshot:
      return "SNAPSHOT";
    case Kind::kClose:
      return "CLOSE";
    case Kind::kNorm:
      return "NORM";
    case Kind::kFactor:
      return "FACTOR";
    case Kind::kWelcome:
      return "WELCOME";
    case Kind::kReject:
      return "REJECT";
    case Kind::kExpired:
      return "EXPIRED";
    case Kind::kAlive:
      return "ALIVE";
    case Kind::kFatal:
      return "FATAL";
    case Kind::kFreed:
      return "FREED";
    case Kind::kDone:
      return "DONE";
    case Kind::kValue:
      return "VALUE";
    case Kind::kWait:
      return "WAIT";
    case Kind::kError:
      return "ERROR";
  }
  return "?";
}

bool operator==(const Error& a, const Error& b) {
  return a.code == b.code && a.who == b.who && a.slice == b.slice &&
      a.text == b.text && a.missing == b.missing;
}

bool operator<(const Error& a, const Error& b) {
  return std::tie(a.code, a.who, a.slice, a.text) <
      std::tie(b.code, b.who, b.slice, b.text);
}

bool operator==(const Group& a, const Group& b) {
  return a.slice == b.slice && a.kid == b.kid && a.round == b.round;
}

} // namespace torchkv::dist
