#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "../../core/export.h"
#include "blob.h"
#include "rare.h"
#include "slice.h"
#include "slice_list.h"

namespace torchkv::dist {

// Requests go from workers to servers, answers from servers to workers; GOT
// goes both ways.
enum class Kind : uint8_t {
  // Requests.
  kHello,
  kHeartbeat,
  kFree,
  kBye,
  kGot,
  // Operations: each is done exactly once, in program order per slice.
  kInit,
  kPush,
  kPushPull,
  kPull,
  kDelete,
  kConfig,
  kEnter,
  kMeet,
  kSnapshot,
  kClose,
  kNorm,
  kFactor,
  // Answers.
  kWelcome,
  kReject,
  kExpired,
  kAlive,
  kFatal,
  kFreed,
  kDone,
  kValue,
  kWait,
  kError,
};
constexpr int kNumKinds = static_cast<int>(Kind::kError) + 1;

// "PUSHPULL"
TORCHKV_API const char* name(Kind kind);
inline bool is_operation(Kind kind) {
  return kind >= Kind::kInit && kind <= Kind::kFactor;
}
inline bool is_answer(Kind kind) {
  return kind >= Kind::kWelcome;
}

enum class ErrorCode : uint8_t {
  kConfig, // the rank's configuration differs
  kShape, // the rank's shape, dtype or placement differs
  kUnknown, // a key that the rank has not initialized
  kRound, // a round out of order
  kGroup, // lists that share keys in different orders
  kLeft, // the rank has closed or deleted a key that others push
  kNeverPushed, // the rank has pushed a key less often than others
  kWorkerLost,
  kServerLost,
  kExpired, // this worker was taken for lost
  kSuperseded, // another process has this worker's rank
  kTimeout,
  kUpdater, // the updater has thrown `text`
  kWrite, // writing a snapshot has thrown `text`
  // Not in messages:
  kTransfer, // copying the values from their device has thrown `text`
};

constexpr auto kLastErrorCode = ErrorCode::kWrite; // in messages
// Whether a store of dist_sync can be used after an operation's error.
inline bool is_survived(ErrorCode code) {
  return code == ErrorCode::kUpdater || code == ErrorCode::kWrite;
}

struct Error {
  ErrorCode code = ErrorCode::kUnknown;
  int32_t who = -1; // rank or server at fault; -1: nobody
  std::optional<SliceId> slice;
  std::string text; // of what was thrown: type and message, for the drivers
  std::vector<int32_t> missing; // of kTimeout: the ranks that were waited for
  // Only the worker's driver has the rest, which is in no message:
  int64_t round = 0; // of its push or pull
  // That the error comes from; of kTimeout, those that have not answered.
  std::vector<int32_t> servers{};
};
// But for the round and the servers.
TORCHKV_API bool operator==(const Error& a, const Error& b);
// By code, who, slice, text.
TORCHKV_API bool operator<(const Error& a, const Error& b);

// Memory that processes of one host share, by name.
struct Region {
  uint64_t segment = 0;
  uint64_t offset = 0;
  uint64_t size = 0;

  friend bool operator==(const Region& a, const Region& b) {
    return a.segment == b.segment && a.offset == b.offset && a.size == b.size;
  }
};

using Counts = std::vector<std::pair<SliceId, int64_t>>; // sorted by slice

// The pushes of one list: the least (slice, kid, round) in it, the same on all
// ranks.
struct Group {
  SliceId slice;
  int64_t kid = 0;
  int64_t round = 0;
};
TORCHKV_API bool operator==(const Group& a, const Group& b);

// Same in all messages of a frame.
struct Header {
  int64_t job = 0;
  uint64_t store = 0;
  int32_t rank = 0; // the worker: sender of a request, receiver of an answer
  int32_t server = 0; // receiver of a request, sender of an answer
  int64_t inc = 0; // incarnation of the worker
  int64_t sinc = 0; // incarnation of the server, from kWelcome
  int64_t committed = 0; // highest generation that all servers have
  // Requests only.
  int64_t floor = 0; // least operation of this worker without an answer
  int64_t phase = 0; // barriers passed
  uint64_t digest = 0;
};

// One message: a flat record, of which each kind uses the fields that are
// commented with it.
struct Message {
  Kind kind = Kind::kHeartbeat;
  Header header;

  // Operations, and answers to them (opno).
  SliceId slice;
  // kPush, kPushPull, kPull: null, or what `slice` is the name of. The numbers
  // are those of the first operation, `total` that of all elements, and there
  // is one piece of any size, with the values one after the other.
  SliceListPtr list;
  // Of a list: if not empty, `prev` of each slice.
  std::vector<int64_t> prevs;
  // Operations from `opno` on. Of an answer, too.
  int32_t count = 1;
  int64_t opno = 0; // counts the worker's operations, from 1
  int64_t prev = 0; // of the same stream; 0 begins one
  int64_t acked = 0; // least operation of the stream without an answer
  int32_t pieces = 0; // of the payload; also of kValue
  int32_t index = -1; // of the piece in this message; -1: none
  Blob payload; // the piece; of kPull, of a query; kConfig: the options, in one
                // piece, not counted; kWelcome of rank 0's heir: the server's
                // latest
  std::optional<Region> region; // kPush, kPushPull: instead of a payload;
                                // kValue: a lease
  int64_t priority = 0;
  int64_t gen = 0; // of the hyperparameters; kWelcome: the server's latest
  int64_t snap = 0; // number of the latest snapshot; kWelcome: likewise
  KeySpec spec; // kInit
  int64_t total = 0; // kPush, kPushPull: elements of the whole key
  // kPush, kPushPull: the payload is codes, of whatever size, and not elements.
  bool is_encoded = false;
  // kPush, kPushPull: of the pushed elements, which travel as they are.
  int32_t dtype = 0; // c10::ScalarType
  int32_t item_bytes = 0; // 0: as the key's
  int64_t round = 0; // kPush, kPushPull, kPull, kNorm, kFactor; answers
  int64_t base = 0; // kPush, kPushPull: version that the worker had
  int64_t min_version = 0; // kPull
  std::vector<int32_t> have; // kPull, kPushPull: pieces received
  Rare<Group> group; // kPush, kPushPull, kNorm
  double factor = 1; // kFactor
  int64_t retire = 0; // kConfig: older generations are not needed
  Counts counts; // kEnter, kMeet, kSnapshot, kClose: pushes of each slice
  int64_t step = 0; // kSnapshot: of rank 0's program

  // Answers.
  int64_t version = 0; // updates of the slice: kDone, kValue
  int64_t kid = 0; // incarnation of the slice: kDone, kValue
  int64_t age = 0; // kDone of a push: versions between its base and its round
  int64_t phase = 0; // kDone of kMeet; kWelcome
  double partial = 0; // kDone of kNorm
  int64_t by = 0; // kExpired: the current incarnation
  std::vector<int32_t> missing; // kWait
  Rare<Error> error; // kError, kReject, kFatal, kAlive, kHeartbeat

  std::vector<std::pair<int64_t, int32_t>> got; // kGot: (opno, index)
  std::vector<int64_t> opnos; // kFree, kFreed

  // Pieces of one number share a frame; not sent.
  int64_t frame = 0;
};

// Messages that travel together. Of one store, to one peer.
using Frame = std::vector<Message>;

} // namespace torchkv::dist
