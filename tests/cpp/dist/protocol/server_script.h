#pragma once

#include <c10/util/ArrayRef.h>

#include <algorithm>
#include <cstring>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "dist/protocol/server.h"

namespace torchkv::dist {

constexpr auto kSync = std::nullopt; // no quorum

// One server core, driven by hand. Values are int64, two to a piece. Rank 0 has
// made the key "k" of four zeros, and all ranks have attached to it.
class ServerScript {
 public:
  using Values = std::vector<int64_t>;
  using Edit = std::function<void(Message&)>;

  static Config config(std::optional<int32_t> quorum, int32_t num_workers = 3) {
    Config config;
    config.job = 1;
    config.store = 9;
    config.num_workers = num_workers;
    config.policy.quorum = quorum;
    config.digest = 77;
    config.piece_bytes = 2 * sizeof(int64_t);
    return config;
  }
  static Config with_leases(Config config) {
    config.leases = true;
    return config;
  }
  static KeySpec spec(int64_t total = 4) {
    KeySpec spec;
    spec.total = total;
    spec.item_bytes = sizeof(int64_t);
    spec.sizes = {total};
    return spec;
  }
  static SliceId slice(const char* key = "k") {
    return {key, 0};
  }

  explicit ServerScript(
      const Config& config,
      const Shard* restored = nullptr,
      bool attached = true)
      : server(0, kSinc, config, 0, restored), config_(config) {
    collect();
    for (int32_t rank = 0; attached && rank < config.num_workers; ++rank) {
      hello(rank);
      init(rank);
    }
  }

  static Blob blob(const Values& values) {
    auto owner = std::make_shared<const Values>(values);
    return {owner, owner->data(), owner->size() * sizeof(int64_t)};
  }
  static Blobs cut(const Values& values) {
    Blobs pieces;
    for (size_t i = 0; i < values.size(); i += 2) {
      const Blob all = blob(values);
      const size_t size = std::min<size_t>(2, values.size() - i);
      pieces.push_back(all.slice(i * sizeof(int64_t), size * sizeof(int64_t)));
    }
    return pieces;
  }
  static Values join(c10::ArrayRef<Blob> pieces) {
    Values values;
    for (const auto& piece : pieces) {
      const size_t size = values.size();
      values.resize(size + (piece.size() / sizeof(int64_t)));
      std::memcpy(values.data() + size, piece.data(), piece.size());
    }
    return values;
  }

  // Requests.
  Message request(int32_t rank, Kind kind, int64_t inc = 1) const {
    Message message;
    message.kind = kind;
    message.header.job = 1;
    message.header.store = 9;
    message.header.rank = rank;
    message.header.inc = inc;
    message.header.sinc = kSinc;
    message.header.digest = 77;
    return message;
  }
  void send(const Message& message) {
    server.on_message({message}, now);
    collect();
  }
  void hello(int32_t rank, int64_t inc = 1) {
    send(request(rank, Kind::kHello, inc));
  }
  // An operation's header, as the worker's next one.
  Message operation(
      int32_t rank,
      Kind kind,
      const SliceId& on,
      const Edit& edit = {},
      int64_t inc = 1) {
    Message message = request(rank, kind, inc);
    message.slice = on;
    message.opno = ++opno_[{rank, inc}];
    auto& last = last_[{rank, inc, on.text()}];
    message.prev = kind == Kind::kInit ? 0 : last;
    last = message.opno;
    if (kind == Kind::kInit) {
      message.spec = spec();
    }
    message.total = 4;
    if (edit) {
      edit(message);
    }
    return message;
  }
  // What is sent of it, each piece in a message.
  static std::vector<Message> parts(Message message, const Values& values) {
    if (values.empty()) {
      return {message};
    }
    std::vector<Message> result;
    const auto pieces = cut(values);
    message.pieces = static_cast<int32_t>(pieces.size());
    for (size_t i = 0; i < pieces.size(); ++i) {
      message.index = static_cast<int32_t>(i);
      message.payload = pieces[i];
      result.push_back(message);
    }
    return result;
  }
  void send_parts(const Message& message, const Values& values) {
    for (const auto& part : parts(message, values)) {
      send(part);
    }
  }
  int64_t init(int32_t rank, int64_t inc = 1, Values values = {0, 0, 0, 0}) {
    const Message message = operation(rank, Kind::kInit, slice(), {}, inc);
    send_parts(message, rank == 0 ? values : Values());
    return message.opno;
  }
  int64_t push(
      int32_t rank,
      int64_t round,
      const Edit& edit = {},
      int64_t inc = 1,
      Kind kind = Kind::kPush) {
    Message message = operation(rank, kind, slice(), edit, inc);
    message.round = round;
    send_parts(message, {1, 1, 1, 1});
    return message.opno;
  }
  int64_t pull(int32_t rank, int64_t min_version = 0) {
    return control(rank, Kind::kPull, [&](Message& message) {
      message.slice = slice();
      message.min_version = min_version;
    });
  }
  // An operation without a payload: on the server, or on the key.
  int64_t control(int32_t rank, Kind kind, const Edit& edit = {}) {
    const bool on_key = kind == Kind::kPull || kind == Kind::kDelete ||
        kind == Kind::kNorm || kind == Kind::kFactor;
    const Message message =
        operation(rank, kind, on_key ? slice() : SliceId(), edit);
    send(message);
    return message.opno;
  }

  // The driver's part.
  void apply(
      const RoundPtr& round,
      const std::optional<std::string>& error = std::nullopt) {
    Values values = join(round->source->pieces);
    for (const auto& push : round->pushes) {
      const Values pushed = join(push.pieces);
      for (size_t i = 0; i < values.size(); ++i) {
        values[i] += pushed[i];
      }
    }
    for (const auto& shot : round->shots) {
      auto copy = std::make_shared<Value>();
      copy->pieces = shot->value->pieces;
      shot->value = copy;
    }
    round->result = round->target ? round->target : std::make_shared<Value>();
    round->result->pieces = cut(values);
    server.on_applied(round, error, now);
    collect();
  }
  void apply_all() {
    while (num_applied_ < begun().size()) {
      apply(begun()[num_applied_++]);
    }
  }
  void lose(int32_t rank) {
    server.on_peer_lost(rank, now);
    collect();
  }
  void wait(Time time) {
    now += time;
    server.on_timer(now);
    collect();
  }
  void collect() {
    for (auto& action : server.take()) {
      if (const auto* made = std::get_if<MakeSlots>(&action)) {
        for (const auto& slot : made->slots) {
          slot->region = Region{++num_regions_, 0, 32};
          slot->pieces.resize(2, blob({0, 0}));
        }
      }
      out.push_back(std::move(action));
    }
  }

  // What has come out.
  std::vector<Message> messages(int32_t rank, Kind kind) const {
    std::vector<Message> result;
    for (const auto* sent : all<Send>()) {
      if (sent->to == Address{Address::Role::kWorker, rank}) {
        for (const auto& message : sent->frame) {
          if (message.kind == kind) {
            result.push_back(message);
          }
        }
      }
    }
    return result;
  }
  std::vector<int64_t> answers(int32_t rank, Kind kind) const {
    std::vector<int64_t> opnos;
    for (const auto& message : messages(rank, kind)) {
      opnos.push_back(message.opno);
    }
    return opnos;
  }
  bool has(int32_t rank, Kind kind, int64_t opno) const {
    const auto opnos = answers(rank, kind);
    return std::find(opnos.begin(), opnos.end(), opno) != opnos.end();
  }
  // The last answer of this kind. REQUIRES: there is one.
  Message last(int32_t rank, Kind kind) const {
    return messages(rank, kind).back();
  }
  // The pulled value.
  Values value(int32_t rank, int64_t opno) const {
    std::map<int32_t, Blob> pieces;
    for (const auto& message : messages(rank, Kind::kValue)) {
      if (message.opno == opno) {
        pieces[message.index] = message.payload;
      }
    }
    std::vector<Blob> list;
    for (const auto& [index, piece] : pieces) {
      list.push_back(piece);
    }
    return join(list);
  }
  std::vector<RoundPtr> begun() const {
    std::vector<RoundPtr> rounds;
    for (const auto* each : all<Apply>()) {
      rounds.push_back(each->round);
    }
    return rounds;
  }
  template <class T>
  std::vector<const T*> all() const {
    std::vector<const T*> result;
    for (const auto& action : out) {
      if (const auto* found = std::get_if<T>(&action)) {
        result.push_back(found);
      }
    }
    return result;
  }
  std::optional<Server::SliceView> view() const {
    const auto views = server.slices();
    if (views.empty()) {
      return std::nullopt;
    }
    return views[0];
  }
  Values stored() const {
    return join(view()->value->pieces);
  }

  static constexpr int64_t kSinc = 7;
  Server server;
  Time now = 0;
  Actions out;

 private:
  const Config config_;
  std::map<std::pair<int32_t, int64_t>, int64_t> opno_;
  std::map<std::tuple<int32_t, int64_t, std::string>, int64_t> last_;
  size_t num_applied_ = 0;
  uint64_t num_regions_ = 0;
};

inline Counts pushes_of_k(int64_t count) {
  return {{ServerScript::slice(), count}};
}

} // namespace torchkv::dist
