#include "simulation.h"

#include <cstdio>

#include "app.h"

namespace torchkv::dist::simulation {

namespace {

constexpr Time kLimit = 60;
constexpr int64_t kMaxEvents = 1000000;

uint64_t seed_of(uint64_t seed, Mode mode, Profile profile) {
  return mix(
      mix(seed, static_cast<uint64_t>(mode)),
      static_cast<uint64_t>(profile) + 100);
}

} // namespace

Simulation::Simulation(
    uint64_t seed,
    Mode mode,
    Profile profile,
    size_t num_logged)
    : plan_(make_plan(seed, mode, profile)),
      num_logged_(num_logged),
      logs_(num_logged != 0),
      random_(seed_of(seed, mode, profile)),
      disk_(mix(seed_of(seed, mode, profile))) {
  jitter_ = random_.choose({0.002, 0.02, 0.2});
  break_chance_ =
      profile == Profile::kCalm ? 0.0 : random_.choose({0.0, 0.005, 0.03});
  full_chance_ = disk_.choose({0.0, 0.0, 0.1, 0.4});
  start(0, nullptr);
  plan_faults();
}

Shard Simulation::copy_of(const Shard& shard) {
  Shard copy = shard;
  for (auto& [slice, shot] : copy.slices) {
    auto fresh = std::make_shared<Shot>();
    fresh->spec = shot->spec;
    fresh->version = shot->version;
    fresh->gen = shot->gen;
    fresh->kid = shot->kid;
    fresh->value = std::make_shared<OwnValue>(gather(shot->value->pieces));
    fresh->value->kid = shot->value->kid;
    fresh->value->version = shot->value->version;
    shot = std::move(fresh);
  }
  return copy;
}

Simulation::~Simulation() {
  // Closures refer to what is destroyed first.
  events_ = {};
}

void Simulation::at(Time delay, std::function<void()> run) {
  events_.push({now_ + delay, ++num_events_, std::move(run)});
}

void Simulation::log(const std::string& what) {
  if (!logs_) {
    return;
  }
  std::array<char, 32> time{};
  std::snprintf(time.data(), time.size(), "%9.4f ", now_);
  log_.push_back(time.data() + what);
  if (log_.size() > num_logged_) {
    log_.pop_front();
  }
}

void Simulation::problem(const std::string& what) {
  problems_.push_back(what);
  log("PROBLEM " + what);
}

void Simulation::run() {
  while (!events_.empty()) {
    const Time next = events_.top().at;
    if (next > kLimit || finished()) {
      break;
    }
    if (num_events_ > kMaxEvents) {
      problem("the events do not end");
      break;
    }
    now_ = next;
    const auto run = std::move(const_cast<Event&>(events_.top()).run);
    events_.pop();
    run();
  }
}

bool Simulation::finished() const {
  if (restarting_ || pending_ != 0) {
    return false;
  }
  for (const App* app : apps_) {
    if ((!app->done() || app->has_calls()) && app->process().alive) {
      return false;
    }
  }
  return true;
}

Config Simulation::config(size_t store, uint64_t digest) const {
  Config config;
  config.job = job_;
  config.store = store;
  config.num_workers = plan_.num_workers;
  config.num_servers = plan_.num_servers;
  // A second store in the same processes is dist_sync.
  config.policy = store == 1 ? Policy() : plan_.policy;
  config.digest = digest;
  config.push_regions = plan_.push_regions;
  config.leases = plan_.leases;
  config.heartbeat = 0.5;
  config.lost = 2;
  config.join = 4;
  config.retry = 0.25;
  config.piece_bytes = kPieceElements * sizeof(Element);
  config.frame_bytes = size_t{1} << 30U;
  config.frame_pieces = 4;
  config.split_bytes = kSplitElements * static_cast<int64_t>(sizeof(Element));
  return config;
}

Process& Simulation::add_process(int name) {
  all_processes_.push_back(std::make_unique<Process>());
  Process& process = *all_processes_.back();
  process.name = name;
  process.number = static_cast<int64_t>(all_processes_.size());
  processes_.push_back(&process);
  return process;
}

int Simulation::host_name(const NodeId& id) const {
  return id.is_worker() || plan_.colocated ? id.number
                                           : plan_.num_workers + id.number;
}

void Simulation::start(size_t pc, const Manifest* restored) {
  processes_.clear();
  apps_.clear();
  servers_.clear();
  restarting_ = false;
  pending_ = 0;
  const int count =
      plan_.num_workers + (plan_.colocated ? 0 : plan_.num_servers);
  for (int name = 0; name < count; ++name) {
    add_process(name);
  }
  hosts_ = processes_;
  for (size_t store = 0; store < plan_.programs.size(); ++store) {
    start_servers(store, restored);
    for (int rank = 0; rank < plan_.num_workers; ++rank) {
      const Program& program = plan_.programs[store][static_cast<size_t>(rank)];
      std::deque<Instruction> prelude;
      if (restored != nullptr) {
        prelude = inits(program, pc);
      }
      all_apps_.push_back(
          std::make_unique<App>(
              *this,
              *hosts_[static_cast<size_t>(rank)],
              NodeId{store, Address::Role::kWorker, rank},
              program,
              pc,
              1,
              std::move(prelude)));
      apps_.push_back(all_apps_.back().get());
    }
  }
  for (Process* host : hosts_) {
    at(random_.uniform(0, 0.1), [this, host] { ticks(*host); });
  }
}

void Simulation::start_servers(size_t store, const Manifest* restored) {
  for (int sid = 0; sid < plan_.num_servers; ++sid) {
    all_nodes_.push_back(std::make_unique<Node>());
    Node& node = *all_nodes_.back();
    node.id = {store, Address::Role::kServer, sid};
    std::optional<Shard> shard;
    if (restored != nullptr) {
      shard = copy_of(
          shards_.at({store, restored->job, restored->number, sid}).shard);
    }
    node.server = std::make_unique<Server>(
        sid,
        job_ * 100 + sid,
        config(store, 1),
        now_,
        shard ? &*shard : nullptr);
    node.server->set_select(select_elements);
    hosts_[static_cast<size_t>(host_name(node.id))]->nodes.push_back(&node);
    servers_[{store, sid}] = &node;
  }
}

void Simulation::ticks(Process& process) {
  if (!process.alive) {
    return;
  }
  if (!process.paused) {
    timers(process);
  }
  at(0.1, [this, &process] { ticks(process); });
}

void Simulation::timers(Process& process) {
  const std::vector<Node*> nodes = process.nodes;
  for (Node* node : nodes) {
    wake(process, *node);
  }
  for (Node* node : nodes) {
    if (node->app != nullptr && process.has(*node)) {
      node->app->run();
    }
  }
}

void Simulation::wake(Process& process, Node& node) {
  if (!process.alive || process.paused || !process.has(node)) {
    return;
  }
  if (node.server) {
    node.server->on_timer(now_);
  } else {
    node.worker->on_timer(now_);
  }
  perform(process, node);
}

} // namespace torchkv::dist::simulation
