#include "app.h"
#include "simulation.h"

namespace torchkv::dist::simulation {

void Simulation::plan_faults() {
  if (plan_.profile == Profile::kFlaky) {
    Time time = random_.uniform(0.05, 1.5);
    const int count = random_.integer(0, 2);
    for (int i = 0; i < count; ++i) {
      const Time duration = random_.uniform(0.1, 0.6);
      if (random_.chance(0.5)) {
        Process* process = random_.choose(hosts_);
        at(time, [=, this] { pause(*process, duration, false); });
      } else if (hosts_.size() > 1) {
        const auto two = random_.sample(hosts_, 2);
        const bool keeps = random_.chance(0.5);
        at(time, [=, this] { partition(*two[0], *two[1], duration, keeps); });
      }
      time += 2.5;
    }
    return;
  }
  if (plan_.profile != Profile::kCrash && plan_.profile != Profile::kRestart) {
    return;
  }
  const bool is_crash = plan_.profile == Profile::kCrash;
  const Time time =
      is_crash ? random_.uniform(0.02, 1.2) : random_.uniform(0.1, 2.0);
  const double dice = random_.uniform(0, 1);
  Process* victim = random_.choose(hosts_);
  if (dice < 0.55 || !is_crash) {
    at(time, [=, this] { crash(*victim); });
  } else if (dice < 0.6) {
    // A wrong belief: somebody takes a living peer for lost.
    blame(*victim);
    at(time, [=, this] {
      for (Process* process : hosts_) {
        if (process != victim && random_.chance(0.5)) {
          blame(*process);
          for (Node* node : process->nodes) {
            for (const Node* lost : victim->nodes) {
              if (lost->id.store == node->id.store &&
                  lost->id.role != node->id.role) {
                at(0.001, [=, this] {
                  believe_lost(*process, *node, lost->id.number);
                });
              }
            }
          }
        }
      }
    });
  } else if (dice < 0.8 || hosts_.size() == 1) {
    blame(*victim);
    const Time duration = random_.uniform(2.0, 5.0);
    const bool replaced = random_.chance(0.5);
    at(time, [=, this] { pause(*victim, duration, replaced); });
  } else {
    const auto two = random_.sample(hosts_, 2);
    blame(*two[0]);
    blame(*two[1]);
    const bool keeps = random_.chance(0.5);
    at(time, [=, this] { partition(*two[0], *two[1], 4.0, keeps); });
  }
}

// What this process does or takes along may be lost for the others.
void Simulation::blame(const Process& process) {
  for (const Node* node : process.nodes) {
    (node->id.is_worker() ? faulty_workers_ : faulty_servers_)
        .insert(node->id.number);
  }
}

void Simulation::crash(Process& process) {
  if (!process.alive) {
    return;
  }
  blame(process);
  kill(process);
  if (plan_.profile == Profile::kRestart) {
    restarting_ = true;
    at(random_.uniform(0.5, 3.0), [this] { restart(); });
  } else if (
      plan_.mode != Mode::kSync && process.has_role(Address::Role::kWorker) &&
      random_.chance(0.5)) {
    at(random_.uniform(0.05, 3.0), [this, &process] { replace(process); });
  }
}

// A new process for the worker of a dead one; its server's slices stay lost.
void Simulation::replace(Process& process) {
  Process& fresh = add_process(process.name);
  for (const Node* node : process.nodes) {
    if (node->app != nullptr && !node->app->done()) {
      come_back(fresh, *node->app);
    }
  }
  log("replaced host " + std::to_string(process.name));
  ticks(fresh);
}

void Simulation::come_back(Process& process, App& old) {
  int64_t& inc = incs_.try_emplace(old.id(), 1).first->second;
  ++inc; // the rendezvous counts
  all_apps_.push_back(
      std::make_unique<App>(
          *this,
          process,
          old.id(),
          old.program(),
          old.pc(),
          inc,
          inits(old.program(), old.pc())));
  App& app = *all_apps_.back();
  app.adopt(old);
  apps_.push_back(&app);
  ++statistics_[Count::kRejoins];
}

void Simulation::kill(Process& process) {
  if (!process.alive) {
    return;
  }
  log("killed host " + std::to_string(process.name));
  process.alive = false;
  const bool fast = random_.chance(0.5);
  if (!fast) {
    return;
  }
  for (Process* other : processes_) {
    if (other == &process) {
      continue;
    }
    for (Node* node : other->nodes) {
      for (const Node* lost : process.nodes) {
        if (node->id.store == lost->id.store &&
            node->id.role != lost->id.role) {
          const Time delay = random_.uniform(0.05, 0.1);
          const int number = lost->id.number;
          at(delay,
             [=, this, job = job_] { notice(*other, *node, number, job); });
        }
      }
    }
  }
}

// The transport reports that a connection has ended, unless another process
// has taken the peer's place.
void Simulation::notice(Process& process, Node& node, int number, int64_t job) {
  const NodeId lost{
      node.id.store,
      node.id.is_worker() ? Address::Role::kServer : Address::Role::kWorker,
      number};
  for (const Process* other : processes_) {
    if (other->alive && other->name != process.name &&
        other->find(lost) != nullptr) {
      return;
    }
  }
  if (job == job_) {
    believe_lost(process, node, number);
  }
}

void Simulation::believe_lost(Process& process, Node& node, int number) {
  if (!process.alive || process.paused || !process.has(node)) {
    return;
  }
  log("host " + std::to_string(process.name) + " takes " +
      (node.id.is_worker() ? "server " : "worker ") + std::to_string(number) +
      " for lost");
  if (node.server) {
    node.server->on_peer_lost(number, now_);
  } else {
    node.worker->on_peer_lost(number, now_);
  }
  perform(process, node);
}

void Simulation::pause(Process& process, Time duration, bool replaced) {
  if (!process.alive || process.paused) {
    return;
  }
  log("stopped host " + std::to_string(process.name) + " for " +
      std::to_string(duration));
  process.paused = true;
  for (Row& row : history_) {
    if (row.process == &process && !row.t1) {
      row.paused += duration;
    }
  }
  at(duration, [this, &process] { resume(process); });
  if (replaced && plan_.mode != Mode::kSync &&
      process.has_role(Address::Role::kWorker) &&
      !process.has_role(Address::Role::kServer)) {
    at(duration * 0.6, [this, &process] { replace(process); });
  }
}

void Simulation::resume(Process& process) {
  log("host " + std::to_string(process.name) + " goes on");
  process.paused = false;
  if (random_.chance(0.5)) {
    timers(process); // the hard order: timers before what has arrived
  }
  const auto backlog = std::exchange(process.backlog, {});
  for (const auto& run : backlog) {
    run();
  }
}

void Simulation::partition(
    const Process& a,
    const Process& b,
    Time duration,
    bool keeps) {
  log("hosts " + std::to_string(a.name) + " and " + std::to_string(b.name) +
      " are cut off for " + std::to_string(duration));
  partitions_[std::minmax(a.name, b.name)] = {now_ + duration, keeps};
}

// The launcher ends what is left of the job, and starts it again from the last
// snapshot.
void Simulation::restart() {
  for (Process* process : processes_) {
    process->alive = false;
  }
  for (Row& row : history_) {
    row.process = nullptr;
  }
  ++job_;
  incs_.clear();
  ++statistics_[Count::kRestarts];
  if (manifests_.count(0) != 0) {
    ++statistics_[Count::kResumed];
    const Manifest manifest = manifests_.at(0);
    start(static_cast<size_t>(manifest.step), &manifest);
  } else {
    start(0, nullptr);
  }
  log("restarted");
}

} // namespace torchkv::dist::simulation
