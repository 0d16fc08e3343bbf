#include <algorithm>
#include <cstring>

#include "app.h"
#include "simulation.h"

namespace torchkv::dist::simulation {

namespace {

bool is_beat(const Frame& frame) {
  const auto& kind = frame.front().kind;
  return kind == Kind::kHeartbeat || kind == Kind::kAlive ||
      kind == Kind::kHello || kind == Kind::kWelcome;
}

// The bytes that a connection between hosts carries are a copy.
void copy_payloads(Frame& frame) {
  for (Message& message : frame) {
    const Blob& from = message.payload;
    if (from.size() == 0) {
      continue;
    }
    const auto words = (from.size() + 7) / 8;
    const auto memory = std::make_shared<std::vector<uint64_t>>(words);
    std::memcpy(memory->data(), from.data(), from.size());
    message.payload = {memory, memory->data(), from.size()};
  }
}

uint64_t checksum_of(const Frame& frame) {
  uint64_t sum = 0;
  for (const Message& message : frame) {
    sum = mix(sum, checksum(message.payload));
  }
  return sum;
}

} // namespace

void Simulation::send(Process& process, Node& source, Send action) {
  ++statistics_[Count::kMessages];
  const NodeId target{source.id.store, action.to.role, action.to.number};
  const auto frame = std::make_shared<Frame>(std::move(action.frame));
  if (source.app != nullptr) {
    source.app->tamper(*frame);
  }
  if (logs_) {
    for (const Message& message : *frame) {
      log(text_of(message));
    }
  }
  if (process.find(target) != nullptr) {
    // To the other core in this process, by reference.
    const uint64_t sum = checksum_of(*frame);
    at(0.00005, [this, target, frame, sum] {
      if (checksum_of(*frame) != sum) {
        problem("bytes have changed under way: " + text_of(frame->front()));
      }
      deliver(target, frame);
    });
  } else {
    copy_payloads(*frame);
    send_between(process, target, frame);
  }
}

// In order on one connection; a broken one loses, delays and repeats.
void Simulation::send_between(
    Process& process,
    const NodeId& target,
    const FramePtr& frame) {
  Link& link = links_[{process.number, target}];
  Time delay = random_.uniform(0.0002, random_.chance(0.2) ? jitter_ : 0.002);
  const int to = host_name(target);
  const auto block = partitions_.find(std::minmax(process.name, to));
  if (block != partitions_.end() && now_ < block->second.until) {
    if (!block->second.keeps) {
      return;
    }
    delay += block->second.until - now_;
  }
  const bool beat = is_beat(*frame);
  if (random_.chance(break_chance_) && !beat) {
    break_link(link);
    if (random_.chance(0.5)) {
      return;
    }
    if (random_.chance(0.3)) {
      const Time later = random_.uniform(0, random_.choose({0.1, 1.0, 3.0}));
      at(later, [this, target, frame] { deliver(target, frame); });
    }
  }
  const Time time = std::max(now_ + delay, link.last + 1e-6);
  link.last = time;
  const auto flight =
      std::make_shared<Flight>(Flight{false, false, beat, target, frame});
  link.flying.erase(
      std::remove_if(
          link.flying.begin(),
          link.flying.end(),
          [](const auto& other) { return other->done; }),
      link.flying.end());
  link.flying.push_back(flight);
  at(time - now_, [this, flight] {
    if (!flight->dead) {
      flight->done = true;
      deliver(flight->target, flight->frame);
    }
  });
}

void Simulation::break_link(Link& link) {
  for (const auto& flight : link.flying) {
    const double dice = random_.uniform(0, 1);
    if (flight->done || flight->beat) {
      continue;
    }
    if (dice < 0.5) {
      flight->dead = true;
    }
    if (dice < 0.15 || dice > 0.8) {
      // The old connection is read late, or the message comes twice.
      const Time later = random_.uniform(0, random_.choose({0.1, 1.0, 3.0}));
      at(later, [this, flight] { deliver(flight->target, flight->frame); });
    }
  }
  link.last = now_;
}

void Simulation::deliver(const NodeId& target, const FramePtr& frame) {
  const std::vector<Process*> processes = processes_;
  for (Process* process : processes) {
    if (!process->alive || process->find(target) == nullptr) {
      continue;
    }
    if (process->paused) {
      process->backlog.emplace_back(
          [this, process, target, frame] { handle(*process, target, frame); });
    } else {
      handle(*process, target, frame);
    }
  }
}

void Simulation::handle(
    Process& process,
    const NodeId& target,
    const FramePtr& frame) {
  Node* node = process.find(target);
  if (!process.alive || node == nullptr) {
    return;
  }
  if (node->app != nullptr) {
    for (const Message& message : *frame) {
      if (message.kind == Kind::kValue && message.payload.size() != 0) {
        node->app->delivered(message.payload);
      }
    }
  }
  if (node->server) {
    node->server->on_message(*frame, now_);
  } else {
    node->worker->on_message(*frame, now_);
  }
  perform(process, *node);
  if (node->app != nullptr) {
    node->app->run();
  }
}

} // namespace torchkv::dist::simulation
