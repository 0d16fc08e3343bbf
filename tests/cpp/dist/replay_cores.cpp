#include "replay_cores.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <map>
#include <optional>
#include <stdexcept>
#include <tuple>
#include <utility>
#include <variant>

#include "dist/protocol/server.h"
#include "dist/protocol/worker.h"

namespace torchkv::dist {

// Breaks the order of rounds, as a wrong program would.
struct WorkerAccess {
  static void skew(Worker& worker, const Key& key, int64_t by) {
    if (WorkerKey* known = worker.keys_.find(key)) {
      for (const auto& table : known->tables) {
        table->round += by;
      }
    }
  }
};

namespace replay {
namespace {

constexpr size_t kPieceBytes = 2 * kItemBytes;

Config parse_config(const Fields& fields) {
  Config config;
  config.job = fields.integer("job");
  config.store = static_cast<uint64_t>(fields.integer("store"));
  config.num_workers = static_cast<int32_t>(fields.integer("workers"));
  config.num_servers = static_cast<int32_t>(fields.integer("servers"));
  if (fields["quorum"] != "-1") {
    config.policy.quorum = static_cast<int32_t>(fields.integer("quorum"));
  }
  if (fields["staleness"] != "-1") {
    config.policy.staleness = fields.integer("staleness");
  }
  config.policy.grace = fields.number("grace");
  config.policy.patience = fields.number("patience");
  config.digest = static_cast<uint64_t>(fields.integer("digest"));
  config.push_regions = fields["regions"] == "1";
  config.leases = fields["leases"] == "1";
  // The model's constants.
  config.heartbeat = 0.5;
  config.lost = 2;
  config.join = 4;
  config.retry = 0.25;
  config.piece_bytes = kPieceBytes;
  config.frame_bytes = std::numeric_limits<size_t>::max();
  config.frame_pieces = 4;
  config.credit = 2;
  config.split_bytes = 40;
  config.regions = 2;
  return config;
}

Blobs pieces_of(const Blob& value) {
  Blobs pieces;
  for (size_t at = 0; at < value.size() || at == 0; at += kPieceBytes) {
    pieces.push_back(value.slice(at, std::min(kPieceBytes, value.size() - at)));
  }
  return pieces;
}

std::vector<std::string> parts(const std::string& line) {
  std::vector<std::string> result;
  size_t at = 0;
  for (;;) {
    const size_t end = line.find(" | ", at);
    result.push_back(line.substr(at, end - at));
    if (end == std::string::npos) {
      return result;
    }
    at = end + 3;
  }
}

Frame parse_frame(const std::vector<std::string>& event) {
  Frame frame;
  for (size_t i = 1; i < event.size(); ++i) {
    frame.push_back(parse_message(event[i]));
  }
  return frame;
}

std::string send_line(const Send& send) {
  std::string result = "send ";
  result += send.to.role == Address::Role::kServer ? 's' : 'w';
  result += std::to_string(send.to.number);
  for (const auto& message : send.frame) {
    result += " | " + text_of(message);
  }
  return result;
}

std::optional<std::string> parse_text(const std::string& word) {
  return word == "-" ? std::nullopt : std::optional<std::string>(word);
}

std::string field(const char* name, int64_t value) {
  return std::string(" ") + name + "=" + std::to_string(value);
}

// A server

class ReplayedServer final : public ReplayedCore {
 public:
  ReplayedServer(const Fields& fields, const Shard* restored)
      : config_(parse_config(fields)),
        id_(static_cast<int32_t>(fields.integer("id"))),
        server_(
            id_,
            fields.integer("sinc"),
            config_,
            fields.number("now"),
            restored) {}

  std::vector<std::string> replay(const std::string& event) override {
    const auto lines = parts(event);
    const auto words = split(lines[0], ' ');
    const std::string& what = words.at(0);
    const Time now = parse_number(words.at(1));
    if (what == "message") {
      server_.on_message(parse_frame(lines), now);
    } else if (what == "timer") {
      server_.on_timer(now);
    } else if (what == "lost") {
      server_.on_peer_lost(
          static_cast<int32_t>(parse_integer(words.at(2))), now);
    } else if (what == "written") {
      server_.on_written(
          parse_integer(words.at(2)), parse_text(words.at(3)), now);
    } else if (what == "measured") {
      const RoundPtr round = find(words);
      round->partial = parse_number(words.at(5));
      server_.on_measured(round, now);
    } else if (what == "applied") {
      const RoundPtr round = find(words);
      finish(*round, words.at(6));
      server_.on_applied(round, parse_text(words.at(5)), now);
    } else {
      throw std::runtime_error("unknown event " + what);
    }
    std::vector<std::string> result;
    for (auto& action : server_.take()) {
      result.push_back(line(action));
    }
    return result;
  }

 private:
  using RoundId = std::tuple<std::string, std::string, std::string>;

  RoundPtr find(const std::vector<std::string>& words) const {
    const auto at = rounds_.find({words.at(2), words.at(3), words.at(4)});
    if (at == rounds_.end()) {
      throw std::runtime_error("no round " + words.at(2));
    }
    return at->second;
  }

  // What the updater has left.
  void finish(Round& round, const std::string& tokens) const {
    auto pieces = pieces_of(parse_value(tokens));
    if (config_.leases) {
      round.target->pieces = std::move(pieces);
    } else {
      round.result = std::make_shared<Value>();
      round.result->pieces = std::move(pieces);
    }
  }

  std::string line(Action& action) {
    if (const auto* send = std::get_if<Send>(&action)) {
      return send_line(*send);
    }
    if (const auto* wake = std::get_if<Wake>(&action)) {
      return "wake " + text_of(wake->at);
    }
    if (const auto* write = std::get_if<WriteShard>(&action)) {
      return line_of(write->shard);
    }
    if (const auto* measure = std::get_if<Measure>(&action)) {
      return "measure " + line_of(measure->round, false);
    }
    if (const auto* apply = std::get_if<Apply>(&action)) {
      for (const auto& shot : apply->round->shots) {
        auto copy = std::make_shared<Value>();
        copy->pieces = shot->value->pieces;
        shot->value = std::move(copy);
      }
      return "apply " + line_of(apply->round, true);
    }
    if (auto* make = std::get_if<MakeSlots>(&action)) {
      uint64_t size = 0;
      for (const auto& piece : make->slots[0]->pieces) {
        size += piece.size();
      }
      for (const auto& slot : make->slots) {
        slot->region =
            Region{500000 + static_cast<uint64_t>(id_), ++num_regions_, size};
      }
      return "slots " + text_of(make->slice) + field("kid", make->kid);
    }
    if (const auto* erase = std::get_if<Erase>(&action)) {
      return "erase " + text_of(erase->slice) + field("kid", erase->kid);
    }
    return "an action of workers";
  }

  static std::string line_of(const Shard& shard) {
    const std::string births = listed(shard.births, [](const auto& birth) {
      return text_of(birth.first) + ":" + std::to_string(birth.second);
    });
    const std::string options = listed(shard.options, [](const auto& each) {
      return std::to_string(each.first) + ":" + options_text(each.second);
    });
    std::string slices;
    for (const auto& [slice, shot] : shard.slices) {
      slices += slices.empty() ? "" : ";";
      slices += text_of(slice);
      for (const int64_t number :
           {shot->spec.total,
            int64_t{shot->spec.whole},
            shot->version,
            shot->gen,
            shot->kid}) {
        slices += ":" + std::to_string(number);
      }
      slices += ":" + text_of(shot->value->pieces);
    }
    return "shard" + field("number", shard.number) + field("job", shard.job) +
        field("gen", shard.gen) + " births=" + births + " options=" + options +
        " slices=" + (slices.empty() ? "-" : slices);
  }

  std::string line_of(const RoundPtr& round, bool is_apply) {
    const std::string slice = text_of(round->slice);
    rounds_[{
        slice, std::to_string(round->kid), std::to_string(round->version)}] =
        round;
    const std::string pushes = listed(round->pushes, [](const Push& push) {
      std::string text;
      for (const int64_t number :
           {int64_t{push.rank}, push.inc, push.opno, push.round, push.base}) {
        text += (text.empty() ? "" : ".") + std::to_string(number);
      }
      return text;
    });
    std::string result = slice + field("kid", round->kid) +
        field("version", round->version) + field("number", round->number) +
        " pushes=" + pushes + " group=" + text_of(round->group) +
        " rate=" + options_text(round->options) +
        field("in_snapshot", round->in_snapshot ? 1 : 0);
    if (is_apply) {
      result += " factor=" + text_of(round->factor);
    }
    return config_.leases ? result + field("slot", round->slot) : result;
  }

  const Config config_;
  const int32_t id_;
  Server server_;
  std::map<RoundId, RoundPtr> rounds_; // slice, incarnation, version
  uint64_t num_regions_ = 0;
};

Shard parse_shard(const std::string& text, int32_t server) {
  const Fields fields(text);
  Shard shard;
  shard.number = fields.integer("number");
  shard.job = fields.integer("job");
  shard.gen = fields.integer("gen");
  shard.server = server;
  shard.births = parse_counts(fields["births"]);
  for (const auto& item : split(fields["options"], ',')) {
    const auto pair = split(item, ':');
    shard.options.emplace_back(
        parse_integer(pair.at(0)), parse_value(pair.at(1)));
  }
  const std::string& slices = fields["slices"];
  for (const auto& item :
       slices == "-" ? std::vector<std::string>() : split(slices, ';')) {
    const auto each = split(item, ':');
    auto shot = std::make_shared<Shot>();
    shot->spec.total = parse_integer(each.at(1));
    shot->spec.whole = each.at(2) == "1";
    shot->spec.item_bytes = kItemBytes;
    shot->version = parse_integer(each.at(3));
    shot->gen = parse_integer(each.at(4));
    shot->kid = parse_integer(each.at(5));
    shot->value = std::make_shared<Value>();
    shot->value->pieces = pieces_of(parse_value(each.at(6)));
    shard.slices.emplace_back(parse_slice(each.at(0)), std::move(shot));
  }
  return shard;
}

// A worker

class ReplayedWorker final : public ReplayedCore {
 public:
  explicit ReplayedWorker(const Fields& fields)
      : rank_(static_cast<int32_t>(fields.integer("id"))),
        inc_(fields.integer("inc")),
        worker_(
            rank_,
            inc_,
            parse_config(fields),
            fields.number("now"),
            [this](int32_t /*server*/, size_t size) {
              return std::make_shared<const Region>(Region{
                  static_cast<uint64_t>((int64_t{rank_} * 1000) + inc_),
                  ++num_regions_,
                  size});
            }) {}

  std::vector<std::string> replay(const std::string& event) override {
    const auto lines = parts(event);
    const auto words = split(lines[0], ' ');
    const std::string& what = words.at(0);
    if (what == "skew") {
      WorkerAccess::skew(worker_, words.at(1), parse_integer(words.at(2)));
      return {};
    }
    const Time now = parse_number(words.at(1));
    if (what == "message") {
      worker_.on_message(parse_frame(lines), now);
    } else if (what == "timer") {
      worker_.on_timer(now);
    } else if (what == "lost") {
      worker_.on_peer_lost(
          static_cast<int32_t>(parse_integer(words.at(2))), now);
    } else if (what == "written") {
      worker_.on_written(
          parse_integer(words.at(2)), parse_text(words.at(3)), now);
    } else if (what == "copied") {
      worker_.on_copied(
          parse_integer(words.at(2)),
          parse_value(words.at(3)),
          parse_integer(words.at(4)),
          parse_integer(words.at(5)),
          now);
    } else if (what == "call") {
      worker_.call(parse_request(lines), now, parse_number(words.at(2)));
    } else {
      throw std::runtime_error("unknown event " + what);
    }
    std::vector<std::string> result;
    for (const auto& action : worker_.take()) {
      result.push_back(line(action));
    }
    return result;
  }

 private:
  static Request parse_request(const std::vector<std::string>& lines) {
    static const std::map<std::string, Request::Kind> kinds{
        {"init", Request::Kind::kInit},
        {"push", Request::Kind::kPush},
        {"pushlist", Request::Kind::kPush},
        {"pushpull", Request::Kind::kPushPull},
        {"pull", Request::Kind::kPull},
        {"delete", Request::Kind::kDelete},
        {"config", Request::Kind::kConfig},
        {"barrier", Request::Kind::kBarrier},
        {"snapshot", Request::Kind::kSnapshot},
        {"close", Request::Kind::kClose},
    };
    const Fields head(lines[0]);
    Request request;
    request.kind = kinds.at(head.word(3));
    request.two_phase = head["two_phase"] == "1";
    request.factor = [](double total) { return std::fmod(total, 4); };
    request.step = head.integer("step");
    request.options = parse_value(head["options"]);
    for (size_t i = 1; i < lines.size(); ++i) {
      const Fields fields(lines[i]);
      Request::Item item;
      item.key = fields["key"];
      item.spec.total = fields.integer("total");
      item.spec.whole = fields["whole"] == "1";
      item.spec.item_bytes = kItemBytes;
      item.priority = fields.integer("priority");
      item.min_version = fields.integer("min_version");
      item.value = parse_value(fields["value"]);
      request.items.push_back(std::move(item));
    }
    return request;
  }

  static std::string line(const Action& action) {
    if (const auto* send = std::get_if<Send>(&action)) {
      return send_line(*send);
    }
    if (const auto* copy = std::get_if<CopyIn>(&action)) {
      return "fill " + text_of(copy->region) + " " +
          text_of(std::vector<Blob>{copy->bytes});
    }
    if (const auto* copy = std::get_if<CopyOut>(&action)) {
      return "copy " + std::to_string(copy->opno) + " " + text_of(copy->region);
    }
    if (const auto* write = std::get_if<WriteManifest>(&action)) {
      const Manifest& manifest = write->manifest;
      const std::string keys = listed(manifest.keys, [](const auto& key) {
        return key.first.text() + ":" + std::to_string(key.second.total);
      });
      return "manifest" + field("number", manifest.number) +
          field("job", manifest.job) + field("step", manifest.step) +
          " keys=" + keys;
    }
    if (const auto* end = std::get_if<Return>(&action)) {
      return line_of(*end);
    }
    return "an action of servers";
  }

  static std::string line_of(const Return& end) {
    std::map<std::string, std::string> results;
    for (const auto& result : end.results) {
      const std::string name = result.slice.is_server()
          ? std::to_string(result.server)
          : text_of(result.slice);
      results[name] = field("version", result.version) +
          field("kid", result.kid) + field("round", result.round) +
          field("age", result.age) + " value=" + text_of(result.pieces);
    }
    std::string line = "return " + std::to_string(end.call);
    line += " error=" + text_of(end.error);
    for (const auto& [name, text] : results) {
      line += " | ";
      line += name;
      line += text;
    }
    return line;
  }

  const int32_t rank_;
  const int64_t inc_;
  uint64_t num_regions_ = 0;
  Worker worker_;
};

} // namespace

std::unique_ptr<ReplayedCore> make_core(
    const std::string& core,
    const std::string& restored) {
  const Fields fields(core);
  if (fields.word(1) == "worker") {
    return std::make_unique<ReplayedWorker>(fields);
  }
  std::optional<Shard> shard;
  if (!restored.empty()) {
    shard = parse_shard(restored, static_cast<int32_t>(fields.integer("id")));
  }
  return std::make_unique<ReplayedServer>(fields, shard ? &*shard : nullptr);
}

} // namespace replay
} // namespace torchkv::dist
