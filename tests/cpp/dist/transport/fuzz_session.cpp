#include "fuzz_session.h"

#include <c10/util/ArrayRef.h>

#include <algorithm>
#include <numeric>
#include <string>
#include <variant>

namespace torchkv::dist {
namespace {

constexpr size_t kMaxSteps = 20000; // of a session
constexpr size_t kMaxSeen = 32;
// What a core may allocate for a frame: what had to wait for it, such as errors
// to all operations, and so much for each of its bytes.
constexpr size_t kMostBytes = size_t{256} << 10U;
constexpr size_t kMaxGrowth = 8;
constexpr uint64_t kMaxRegion = uint64_t{1} << 20U;

size_t size_of(c10::ArrayRef<Blob> pieces) {
  return std::accumulate(
      pieces.begin(), pieces.end(), size_t{0}, [](size_t sum, const Blob& x) {
        return sum + x.size();
      });
}

// For the sanitizers.
void read_all(c10::ArrayRef<Blob> pieces) {
  unsigned sum = 0;
  for (const Blob& piece : pieces) {
    for (size_t i = 0; i < piece.size(); ++i) {
      sum += static_cast<unsigned>(piece.data()[i]);
    }
  }
  volatile unsigned sink = sum;
  static_cast<void>(sink);
}

size_t num_pieces(size_t bytes, size_t piece) {
  return std::max<size_t>(1, (bytes + piece - 1) / piece);
}

// Of a list of slices.
struct ListValue final : Value {
  std::shared_ptr<const std::vector<RoundPart>> of;

  ValuePtr part(size_t i) const override {
    auto value = std::make_shared<Value>();
    value->pieces.push_back(of->at(i).of(pieces[0]));
    return value;
  }
};

size_t index(int32_t number) {
  return static_cast<size_t>(number);
}

} // namespace

FuzzSession::FuzzSession(uint64_t seed, bool is_calm)
    : random_(seed),
      mutator_(random_.bits()),
      is_calm_(is_calm),
      config_(make_config(random_)),
      limits_{
          config_.num_workers,
          config_.num_servers,
          Limits().num_pieces,
          &known_lists_},
      begin_(
          0.001 * static_cast<double>(random_.below(4) * random_.below(200))),
      wrong_rank_(
          is_calm || !random_.chance(4)
              ? -1
              : random_.from(0, config_.num_workers)) {
  make_requests();
  servers_.resize(index(config_.num_servers));
  for (int32_t sid = 0; sid < config_.num_servers; ++sid) {
    make_server(sid, nullptr);
  }
  shards_.resize(servers_.size());
  workers_.resize(index(config_.num_workers));
  programs_.resize(workers_.size());
  for (int32_t rank = 0; rank < config_.num_workers; ++rank) {
    make_worker(rank);
  }
}

void FuzzSession::make_server(int32_t sid, const Shard* restored) {
  auto& server = servers_[index(sid)];
  server = std::make_unique<Server>(
      sid, random_.counter(1), config_, now_, restored);
  // An answer of as many bytes as the query has.
  server->set_select([](const auto& /*slice*/,
                        const KeySpec& spec,
                        const auto& /*value*/,
                        const Blobs& query) {
    read_all(query);
    const auto answer = std::make_shared<Value>();
    answer->pieces = query;
    return spec.is_row_sparse() ? answer : nullptr;
  });
}

void FuzzSession::make_worker(int32_t rank) {
  Program& program = programs_[index(rank)];
  workers_[index(rank)] = std::make_unique<Worker>(
      rank, program.inc, config_, now_, [this](int32_t, size_t bytes) {
        const Region region{++last_segment_, 0, bytes};
        return std::make_shared<const Region>(region);
      });
}

std::vector<Place> FuzzSession::places_of(const Key& key, const KeySpec& spec)
    const {
  return place(key, spec, config_.num_servers, config_.split_bytes);
}

const KeySpec& FuzzSession::spec_of(const Key& key) const {
  return specs_.at(key.kind() == KeyKind::kInt ? key.id() : 2);
}

size_t FuzzSession::bytes_of(const SliceId& slice) const {
  const KeySpec& spec = spec_of(slice.key);
  const Place at = places_of(slice.key, spec).at(index(slice.index));
  return static_cast<size_t>((at.end - at.begin) * spec.item_bytes);
}

bool FuzzSession::is_done() const {
  return std::all_of(
      programs_.begin(), programs_.end(), [](const Program& program) {
        return program.is_closed;
      });
}

void FuzzSession::run(int64_t max_inputs) {
  max_inputs_ = max_inputs;
  for (size_t i = 0; i < kMaxSteps; ++i) {
    if (is_calm_ ? is_done() : num_inputs_ >= max_inputs) {
      return;
    }
    step();
  }
  fuzz_expect(!is_calm_, "calls that never return");
}

void FuzzSession::step() {
  begin_calls();
  now_ += 0.001;
  if (!work_.empty() && random_.chance(2)) {
    work_on(random_.below(work_.size()));
  } else if (!packets_.empty()) {
    const size_t at = random_.below(std::min<size_t>(packets_.size(), 3));
    const Packet packet = std::move(packets_[at]);
    packets_.erase(packets_.begin() + static_cast<int64_t>(at));
    deliver(packet);
  } else {
    now_ += 0.03;
    tick();
  }
  if (random_.chance(50)) {
    tick();
  }
  if (!is_calm_ && random_.chance(300)) {
    disturb();
  }
  perform_all();
}

// What else may happen.
void FuzzSession::disturb() {
  const int32_t rank = random_.from(0, config_.num_workers);
  const int32_t sid = random_.from(0, config_.num_servers);
  switch (random_.below(4)) {
    case 0:
      servers_[index(sid)]->on_peer_lost(rank, now_);
      break;
    case 1:
      workers_[index(rank)]->on_peer_lost(sid, now_);
      break;
    case 2: { // another process takes its place
      const auto& shard = shards_[index(sid)];
      work_.erase(
          std::remove_if(
              work_.begin(),
              work_.end(),
              [&](const Work& work) { return work.server == sid; }),
          work_.end());
      make_server(sid, shard ? &*shard : nullptr);
      break;
    }
    default:
      programs_[index(rank)] = {0, programs_[index(rank)].inc + 1, {}, false};
      make_worker(rank);
      break;
  }
}

void FuzzSession::tick() {
  for (const auto& server : servers_) {
    server->on_timer(now_);
  }
  for (const auto& worker : workers_) {
    worker->on_timer(now_);
  }
}

void FuzzSession::begin_calls() {
  for (int32_t rank = 0; rank < config_.num_workers; ++rank) {
    Program& program = programs_[index(rank)];
    Worker& worker = *workers_[index(rank)];
    while (program.next < requests_.size() && worker.ready() &&
           worker.stalled() == 0) {
      const Request& request = requests_[program.next];
      if (!may_begin(program, request)) {
        break;
      }
      ++program.next;
      if (rank != 0 &&
          (request.kind == Request::Kind::kConfig ||
           request.kind == Request::Kind::kSnapshot)) {
        continue;
      }
      const CallId id = worker.call(
          rank == wrong_rank_ ? altered(request) : request,
          now_,
          is_calm_ ? 1000 : random_.from(1, 5));
      program.calls.emplace(id, request.kind);
    }
  }
  perform_all();
}

void FuzzSession::work_on(size_t at) {
  const Work work = work_[at];
  work_.erase(work_.begin() + static_cast<int64_t>(at));
  Server& server = *servers_[index(work.server)];
  Round& round = *work.round;
  if (work.is_measure) {
    round.partial = random_.real();
    server.on_measured(work.round, now_);
    return;
  }
  if (round.parts) {
    auto value = std::make_shared<ListValue>();
    value->of = round.parts;
    value->pieces.push_back(random_.bytes(
        static_cast<size_t>(round.num_elements * round.spec->item_bytes)));
    round.result = std::move(value);
    if (!is_calm_ && random_.chance(10)) {
      round.errors.resize(round.parts->size());
      round.errors[random_.below(round.errors.size())] = "thrown";
    }
  } else if (round.target != nullptr) {
    stamps_[round.target->region->segment] = {round.kid, round.version};
    round.result = round.target;
  } else {
    round.result = std::make_shared<Value>();
    round.result->pieces = round.source->pieces;
  }
  const bool throws = !is_calm_ && random_.chance(10);
  server.on_applied(
      work.round,
      throws ? std::optional<std::string>("thrown") : std::nullopt,
      now_);
}

void FuzzSession::deliver(const Packet& packet) {
  const Direction direction = direction_to(packet.to);
  const auto frame = fuzz_decode(packet.input, direction, limits_);
  if (!frame) {
    fuzz_failed("a core has sent what decode refuses");
  }
  if (is_calm_ || now_ < begin_) {
    hand_over(packet.to, *frame);
    return;
  }
  const bool is_first = random_.chance(2);
  if (is_first) {
    hand_over(packet.to, *frame);
  }
  inject_like(packet, *frame);
  if (!is_first && !random_.chance(8)) {
    hand_over(packet.to, *frame);
  }
  if (seen_.size() < kMaxSeen) {
    seen_.push_back(*frame);
  } else {
    seen_[random_.below(kMaxSeen)] = *frame;
  }
}

void FuzzSession::inject_like(const Packet& packet, const Frame& frame) {
  const Direction direction = direction_to(packet.to);
  const Frame* other = &frame;
  for (int i = 0; i < 4 && other == &frame && !seen_.empty(); ++i) {
    const Frame& any = seen_[random_.below(seen_.size())];
    if (direction_of(any.front().kind) == direction) {
      other = &any;
    }
  }
  const uint64_t copies = random_.below(6);
  for (uint64_t i = 0; i < copies && num_inputs_ < max_inputs_; ++i) {
    inject(
        {packet.to,
         random_.chance(20) ? mutator_.noise(direction)
                            : mutator_.mutated(frame, *other, direction)});
  }
}

void FuzzSession::inject(const Packet& packet) {
  ++num_inputs_;
  if (const auto frame =
          fuzz_decode(packet.input, direction_to(packet.to), limits_)) {
    ++num_accepted_;
    hand_over(packet.to, *frame);
  }
}

void FuzzSession::hand_over(const Address& to, const Frame& frame) {
  size_t bytes = 0;
  for (const Message& message : frame) {
    const size_t count = message.list ? message.list->size() : 1;
    bytes += count * sizeof(message) + message.payload.size();
  }
  num_bytes_ += bytes;
  fuzz_allocated();
  if (to.role == Address::Role::kServer) {
    servers_[index(to.number)]->on_message(frame, now_);
  } else {
    workers_[index(to.number)]->on_message(frame, now_);
  }
  fuzz_expect(
      fuzz_allocated() <= kMostBytes + kMaxGrowth * bytes,
      "too much memory for a frame");
  perform_all();
}

void FuzzSession::perform_all() {
  for (int32_t sid = 0; sid < config_.num_servers; ++sid) {
    Server& server = *servers_[index(sid)];
    perform({Address::Role::kServer, sid}, server.take());
  }
  for (int32_t rank = 0; rank < config_.num_workers; ++rank) {
    perform({Address::Role::kWorker, rank}, workers_[index(rank)]->take());
  }
}

void FuzzSession::perform(const Address& of, Actions actions) {
  for (Action& action : actions) {
    if (auto* send = std::get_if<Send>(&action)) {
      Encoded encoded =
          encode(send->frame, direction_to(send->to), random_token());
      packets_.push_back(
          {send->to, {std::move(encoded.head), std::move(encoded.payloads)}});
    } else if (const auto* apply = std::get_if<Apply>(&action)) {
      check(*apply->round);
      work_.push_back({of.number, apply->round, false});
    } else if (const auto* measure = std::get_if<Measure>(&action)) {
      check(*measure->round);
      work_.push_back({of.number, measure->round, true});
    } else if (const auto* slots = std::get_if<MakeSlots>(&action)) {
      const uint64_t bytes = size_of(slots->slots[0]->pieces);
      for (const ValuePtr& slot : slots->slots) {
        slot->region = Region{++last_segment_, 0, bytes};
        stamps_[last_segment_] = {slot->kid, slot->version};
      }
    } else if (const auto* shard = std::get_if<WriteShard>(&action)) {
      shards_[index(of.number)] = shard->shard;
      servers_[index(of.number)]->on_written(
          shard->shard.number, std::nullopt, now_);
    } else if (const auto* manifest = std::get_if<WriteManifest>(&action)) {
      workers_[index(of.number)]->on_written(
          manifest->manifest.number, std::nullopt, now_);
    } else if (const auto* copy = std::get_if<CopyOut>(&action)) {
      const Region& region = copy->region;
      const auto stamp = stamps_.find(region.segment);
      const bool is_known = stamp != stamps_.end() && region.size <= kMaxRegion;
      fuzz_expect(!is_calm_ || is_known, "a lease of unknown memory");
      workers_[index(of.number)]->on_copied(
          copy->opno,
          is_known ? random_.bytes(region.size) : Blob(),
          is_known ? stamp->second.first : -1,
          is_known ? stamp->second.second : -1,
          now_);
    } else if (const auto* result = std::get_if<Return>(&action)) {
      check(of.number, *result);
    }
  }
}

// What the driver's work relies on.
void FuzzSession::check(const Round& round) {
  ++num_rounds_;
  fuzz_expect(!round.pushes.empty() && round.source, "an empty round");
  const auto bytes = [&](int32_t item_bytes) {
    return static_cast<size_t>(
        round.num_elements *
        (item_bytes == 0 ? round.spec->item_bytes : item_bytes));
  };
  for (size_t i = 0; round.parts && i < round.parts->size(); ++i) {
    const RoundPart& part = (*round.parts)[i];
    const ValuePtr value = round.source->part(i);
    fuzz_expect(
        value->pieces.size() == 1 &&
            size_of(value->pieces) ==
                static_cast<size_t>(part.num_elements * part.spec->item_bytes),
        "a value of a list of another size");
    read_all(value->pieces);
  }
  fuzz_expect(
      config_.leases || round.parts || round.spec->is_row_sparse() ||
          size_of(round.source->pieces) == bytes(0),
      "a value of another size");
  read_all(round.source->pieces);
  for (const Push& push : round.pushes) {
    const size_t size = bytes(push.item_bytes);
    if (push.region) {
      fuzz_expect(
          config_.push_regions && push.region->size == size,
          "a region of another size");
      continue;
    }
    const size_t got = size_of(push.pieces);
    fuzz_expect(
        push.is_encoded
            ? got <= static_cast<size_t>(max_encoded_bytes(*round.spec))
            : got == size && !round.spec->is_row_sparse(),
        "a push of another size");
    fuzz_expect(
        push.pieces.size() ==
            (round.parts ? 1 : num_pieces(got, config_.piece_bytes)),
        "a push in other pieces");
    read_all(push.pieces);
  }
}

void FuzzSession::check(int32_t rank, const Return& result) {
  ++num_returns_;
  Program& program = programs_[index(rank)];
  const auto call = program.calls.find(result.call);
  fuzz_expect(call != program.calls.end(), "a call that has returned twice");
  const Request::Kind kind = call->second;
  program.calls.erase(call);
  program.is_closed = program.is_closed || kind == Request::Kind::kClose;
  fuzz_expect(!is_calm_ || !result.error, "a call that fails");
  if (result.error ||
      (kind != Request::Kind::kPull && kind != Request::Kind::kPushPull)) {
    return;
  }
  for (const SliceResult& slice : result.results) {
    if (slice.slice.is_list()) {
      const bool is_known =
          std::any_of(lists_.begin(), lists_.end(), [&](const auto& list) {
            size_t bytes = 0;
            for (size_t i = 0; i < list->size(); ++i) {
              bytes += bytes_of(list->slice(i));
            }
            return list->name() == slice.slice &&
                size_of(slice.pieces) == bytes;
          });
      fuzz_expect(is_known, "a pulled list of another size");
      read_all(slice.pieces);
      continue;
    }
    const size_t bytes = spec_of(slice.slice.key).is_row_sparse()
        ? kQueryBytes
        : bytes_of(slice.slice);
    fuzz_expect(
        slice.error || size_of(slice.pieces) == bytes,
        "a pulled value of another size");
    read_all(slice.pieces);
  }
}

} // namespace torchkv::dist
