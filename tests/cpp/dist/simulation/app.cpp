#include "app.h"

#include <algorithm>
#include <cstring>
#include <numeric>

namespace torchkv::dist::simulation {

namespace {

using Kind = Instruction::Kind;

bool is_call(Kind kind) {
  return kind != Kind::kNop && kind != Kind::kWait && kind != Kind::kStop;
}

Request::Kind request_kind(Kind kind) {
  switch (kind) {
    case Kind::kInit:
      return Request::Kind::kInit;
    case Kind::kPush:
      return Request::Kind::kPush;
    case Kind::kPushPull:
      return Request::Kind::kPushPull;
    case Kind::kPull:
      return Request::Kind::kPull;
    case Kind::kDelete:
      return Request::Kind::kDelete;
    case Kind::kConfig:
      return Request::Kind::kConfig;
    case Kind::kBarrier:
      return Request::Kind::kBarrier;
    case Kind::kSnapshot:
      return Request::Kind::kSnapshot;
    default:
      return Request::Kind::kClose;
  }
}

Blob options_of(int64_t rate) {
  const auto memory = std::make_shared<int64_t>(rate);
  return {memory, memory.get(), sizeof(int64_t)};
}

template <class Map>
auto* find_key(Map& map, const Key& key) {
  const auto at = std::find_if(
      map.begin(), map.end(), [&](const auto& x) { return x.first == key; });
  return at == map.end() ? nullptr : &*at;
}

} // namespace

std::deque<Instruction> inits(const Program& program, size_t pc) {
  std::deque<Instruction> found;
  for (size_t i = 0; i < pc && i < program.size(); ++i) {
    if (program[i].kind != Kind::kInit) {
      continue;
    }
    const Key& key = program[i].items[0].key;
    const auto same = std::find_if(found.begin(), found.end(), [&](auto& x) {
      return x.items[0].key == key;
    });
    if (same == found.end()) {
      found.push_back(program[i]);
    } else {
      *same = program[i];
    }
  }
  return found;
}

App::App(
    Simulation& simulation,
    Process& process,
    const NodeId& id,
    const Program& program,
    size_t pc,
    int64_t inc,
    std::deque<Instruction> prelude)
    : simulation_(simulation),
      process_(process),
      id_(id),
      program_(program),
      pc_(pc),
      inc_(inc),
      prelude_(std::move(prelude)) {
  const auto& misuse = simulation.plan_.misuse;
  const bool is_wrong = misuse && misuse->kind == Misuse::Kind::kConfig &&
      misuse->rank == id.number;
  simulation.all_nodes_.push_back(std::make_unique<Node>());
  node_ = simulation.all_nodes_.back().get();
  node_->id = id;
  node_->app = this;
  node_->worker = std::make_unique<Worker>(
      id.number,
      inc,
      simulation.config(id.store, is_wrong ? 2 : 1),
      simulation.now_,
      [this](int32_t, size_t bytes) {
        return simulation_.allocate(id_, inc_, ++num_regions_, bytes);
      });
  if (Node* old = process.find(id)) {
    std::replace(process.nodes.begin(), process.nodes.end(), old, node_);
  } else {
    process.nodes.push_back(node_);
  }
}

void App::adopt(const App& old) {
  dead_keys_ = old.dead_keys_;
  prelude_.erase(
      std::remove_if(
          prelude_.begin(),
          prelude_.end(),
          [&](const auto& x) { return is_dead(x.items[0].key); }),
      prelude_.end());
}

bool App::is_dead(const Key& key) const {
  return std::find(dead_keys_.begin(), dead_keys_.end(), key) !=
      dead_keys_.end();
}

bool App::has_key(const Key& key) const {
  return find_key(keys_, key) != nullptr;
}

int64_t App::numel(const Key& key) const {
  const auto* found = find_key(keys_, key);
  return found == nullptr ? 1 : found->second;
}

bool App::must_wait() const {
  return std::any_of(rows_.begin(), rows_.end(), [](const auto& x) {
    const Kind kind = x.second->instruction.kind;
    return kind != Kind::kConfig && kind != Kind::kSnapshot;
  });
}

void App::run() {
  if (busy_ || asleep_) {
    return;
  }
  busy_ = true;
  while (!asleep_ && step()) {
  }
  busy_ = false;
}

// Whether there may be more to do.
bool App::step() {
  const bool may_call = !done_ && process_.alive && process_.has(*node_) &&
      node_->worker->ready() && blocked_ == 0 && node_->worker->stalled() == 0;
  const bool waits = may_call && prelude_.empty() && pc_ < program_.size() &&
      program_[pc_].kind == Kind::kWait && must_wait();
  if (!may_call || waits) {
    const bool acted = std::exchange(acted_, false);
    if (acted) {
      simulation_.perform(process_, *node_);
    }
    return acted;
  }
  Instruction instruction;
  int64_t pc = -1;
  if (!prelude_.empty()) {
    instruction = prelude_.front();
    prelude_.pop_front();
  } else if (pc_ < program_.size()) {
    pc = static_cast<int64_t>(pc_);
    instruction = program_[pc_++];
  } else {
    done_ = true;
    return true;
  }
  if (instruction.kind == Kind::kSleep) {
    asleep_ = true;
    simulation_.at(instruction.sleep, [this] { wake(); });
  }
  if (instruction.kind == Kind::kStop) {
    done_ = true;
  }
  const bool has_items = !instruction.items.empty();
  auto& items = instruction.items;
  items.erase(
      std::remove_if(
          items.begin(),
          items.end(),
          [&](const Item& item) { return is_dead(item.key); }),
      items.end());
  const bool is_dropped = has_items && items.empty();
  if (is_call(instruction.kind) && !asleep_ && !is_dropped) {
    issue(instruction, pc);
  }
  // Several calls may begin before their messages go out together.
  if (acted_ && (asleep_ || simulation_.random_.chance(0.7))) {
    acted_ = false;
    simulation_.perform(process_, *node_);
  }
  return true;
}

void App::wake() {
  if (process_.paused) {
    process_.backlog.emplace_back([this] { wake(); });
    return;
  }
  asleep_ = false;
  run();
}

// What a pull asks of the key's slices; nothing before its init has returned.
std::vector<Request::Query> App::queries_of(const Item& item, Row& row) {
  KeySpec spec;
  spec.total = numel(item.key);
  spec.item_bytes = sizeof(Element);
  spec.sizes = {spec.total};
  spec.whole = std::count_if(rounds_.begin(), rounds_.end(), [&](auto& x) {
                 return x.first.key == item.key;
               }) == 1;
  const Config config = simulation_.config(id_.store, 1);
  std::vector<Request::Query> queries;
  for (const Place& place : torchkv::dist::place(
           item.key, spec, config.num_servers, config.split_bytes)) {
    const SliceId slice{item.key, place.index};
    if (rounds_.find(slice) == rounds_.end()) {
      return {};
    }
    Asked asked{{}, place.end - place.begin};
    Elements numbers;
    for (int64_t i = 0; i < asked.length; i += item.stride) {
      asked.elements.push_back(i);
      numbers.emplace_back().unused = static_cast<int32_t>(i);
    }
    const size_t bytes = numbers.size() * sizeof(Element);
    queries.push_back({make_blob(std::move(numbers)), bytes});
    row.asked[slice] = std::move(asked);
  }
  ++simulation_.statistics_[Count::kQueries];
  return queries;
}

Request::Item App::item_of(
    const Instruction& instruction,
    const Item& item,
    Row& row) {
  Request::Item result;
  result.key = item.key;
  result.priority = item.priority;
  result.min_version = item.min_version;
  result.dtype = 6;
  result.item_bytes = sizeof(Element);
  if (instruction.kind == Kind::kInit) {
    result.dtype = item.dtype;
    result.spec.total = item.numel;
    result.spec.dtype = item.dtype;
    result.spec.item_bytes = sizeof(Element);
    result.spec.whole = item.whole;
    result.spec.sizes = {item.numel};
    if (rank() == 0) {
      result.value = make_blob(Elements(static_cast<size_t>(item.numel)));
    }
    if (auto* known = find_key(keys_, item.key)) {
      known->second = item.numel;
    } else {
      keys_.emplace_back(item.key, item.numel);
    }
  } else if (item.stride != 0) {
    result.queries = queries_of(item, row);
  } else if (instruction.is_push()) {
    result.value = make_blob(Elements(
        static_cast<size_t>(numel(item.key)),
        pushed(item.uid, item.weight, item.poison)));
  }
  return result;
}

Request App::request_of(const Instruction& instruction, Row& row) {
  Request request;
  request.kind = request_kind(instruction.kind);
  for (const Item& item : instruction.items) {
    request.items.push_back(item_of(instruction, item, row));
  }
  request.two_phase = instruction.two_phase;
  if (instruction.two_phase && rank() == 0) {
    request.factor = factor_of;
  }
  if (instruction.kind == Kind::kConfig) {
    request.options = options_of(instruction.rate);
  }
  request.step = static_cast<int64_t>(pc_);
  const bool has_values =
      instruction.is_push() || instruction.kind == Kind::kPull;
  if (simulation_.plan_.joins && has_values && !instruction.corrupt) {
    join(request, row);
  }
  return request;
}

void App::issue(const Instruction& instruction, int64_t pc) {
  Row row;
  row.store = id_.store;
  row.rank = rank();
  row.inc = inc_;
  row.job = simulation_.job_;
  row.pc = pc;
  row.instruction = instruction;
  row.t0 = simulation_.now_;
  row.start = simulation_.tick();
  row.process = &process_;
  note_rounds(row);
  simulation_.history_.push_back(std::move(row));
  Row& stored = simulation_.history_.back();
  const Time timeout = instruction.timeout != 0 ? instruction.timeout
                                                : simulation_.plan_.timeout;
  const CallId call = node_->worker->call(
      request_of(instruction, stored), simulation_.now_, timeout);
  acted_ = true;
  ++simulation_.statistics_[Count::kCalls];
  if (node_->worker->stalled() == call) {
    ++simulation_.statistics_[Count::kStalls];
  }
  rows_[call] = &stored;
  if (instruction.block) {
    blocked_ = call;
  }
  if (simulation_.logs_) {
    simulation_.log("call " + std::to_string(call) + " " + text_of(stored));
  }
}

// Counts the pushes of each slice, as the worker does: only so is it known
// which message is to be made wrong.
void App::note_rounds(const Row& row) {
  const Instruction& instruction = row.instruction;
  if (!instruction.is_push()) {
    return;
  }
  for (const Item& item : instruction.items) {
    Corruption corruption{item.key, {}};
    for (auto& [slice, round] : rounds_) {
      if (slice.key == item.key) {
        ++round;
        corruption.pushes[slice] = {round, 0};
      }
    }
    if (instruction.corrupt) {
      corruptions_.push_back(std::move(corruption));
    }
  }
}

void App::tamper(Frame& frame) {
  for (Corruption& corruption : corruptions_) {
    for (Message& message : frame) {
      const auto at = corruption.pushes.find(message.slice);
      if (at == corruption.pushes.end() ||
          (message.kind != torchkv::dist::Kind::kPush &&
           message.kind != torchkv::dist::Kind::kPushPull)) {
        continue;
      }
      auto& [round, opno] = at->second;
      if (opno == 0 && message.round == round) {
        opno = message.opno;
      }
      if (opno == message.opno) {
        message.round = round + 1;
      }
    }
  }
}

void App::delivered(const Blob& piece) {
  delivered_[piece.data()] = {piece.owner(), checksum(piece)};
}

void App::returned(const Return& result) {
  const auto at = rows_.find(result.call);
  if (at == rows_.end()) {
    simulation_.problem("a call has ended twice");
    return;
  }
  Row& row = *at->second;
  rows_.erase(at);
  row.t1 = simulation_.now_;
  row.end = simulation_.tick();
  row.error = result.error;
  if (row.error && row.error->slice && row.error->slice->is_list()) {
    simulation_.problem("an error names a list");
  }
  for (const SliceResult& from : result.results) {
    for (const Blob& piece : from.pieces) {
      const auto known = delivered_.find(piece.data());
      if (known != delivered_.end() &&
          known->second.owner.lock() == piece.owner() &&
          known->second.sum != checksum(piece)) {
        simulation_.problem(
            "a piece of " + from.slice.text() + " has changed since it came");
      }
    }
    if (from.error) {
      simulation_.problem("an error in a result without an error");
    }
    if (from.slice.is_list()) {
      note_parts(row, from);
    } else if (!from.slice.is_server()) {
      note_part(row, from);
      if (row.instruction.kind == Kind::kInit) {
        rounds_[from.slice] = from.round;
      }
    }
  }
  if (simulation_.logs_) {
    simulation_.log("returned " + text_of(row));
  }
  if (row.succeeded() && row.instruction.kind == Kind::kDelete) {
    const Key key = row.instruction.items[0].key;
    keys_.erase(
        std::remove_if(
            keys_.begin(),
            keys_.end(),
            [&](const auto& x) { return x.first == key; }),
        keys_.end());
    for (auto slice = rounds_.begin(); slice != rounds_.end();) {
      slice = slice->first.key == key ? rounds_.erase(slice) : ++slice;
    }
  }
  if (blocked_ == result.call) {
    blocked_ = 0;
  }
  if (row.error) {
    failed(*row.error, row);
  }
  if (!process_.paused) {
    run();
  }
}

void App::failed(const Error& error, const Row& row) {
  const Kind kind = row.instruction.kind;
  const bool is_asked_for =
      error.code == ErrorCode::kTimeout && row.instruction.timeout != 0;
  if (done_ || is_survived(error.code) || is_asked_for) {
    return; // the store stays usable
  }
  if (error.code == ErrorCode::kExpired) {
    done_ = true;
    simulation_.at(simulation_.random_.uniform(0.1, 1.0), [this] { rejoin(); });
  } else if (
      error.code == ErrorCode::kServerLost &&
      simulation_.plan_.mode != Mode::kSync) {
    if (kind == Kind::kBarrier || kind == Kind::kSnapshot ||
        kind == Kind::kConfig || kind == Kind::kClose) {
      return;
    }
    if (row.key()) {
      dead_keys_.push_back(*row.key());
    } else if (error.slice) {
      dead_keys_.push_back(error.slice->key);
    }
  } else {
    done_ = true;
    simulation_.failed_.insert(rank());
    simulation_.at(1.2, [this] { give_up(); });
  }
}

void App::give_up() {
  const Plan& plan = simulation_.plan_;
  if (plan.mode != Mode::kSync && plan.profile == Profile::kCrash) {
    // What it takes along is lost for the others, too.
    simulation_.blame(process_);
  }
  simulation_.kill(process_);
}

// The same process comes back (not in sync), unless another has its rank: what
// the server said may be older than that, so the rendezvous has the last word.
void App::rejoin() {
  const auto latest = simulation_.incs_.find(id_);
  const bool is_latest =
      inc_ == (latest == simulation_.incs_.end() ? 1 : latest->second);
  if (is_latest && process_.alive && process_.has(*node_)) {
    simulation_.come_back(process_, *this);
  }
}

} // namespace torchkv::dist::simulation
