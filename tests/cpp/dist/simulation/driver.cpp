#include <algorithm>
#include <cstring>

#include "app.h"
#include "simulation.h"
#include "update.h"

namespace torchkv::dist::simulation {

// Carries out what a core has asked for.
struct Performer {
  Simulation& simulation;
  Process& process;
  Node& node;

  void operator()(Send& action) const {
    simulation.send(process, node, std::move(action));
  }
  void operator()(const Wake& action) const {
    const Time delay = std::max(action.at - simulation.now_, 0.0) + 1e-6;
    simulation.at(delay, [*this] { simulation.wake(process, node); });
  }
  void operator()(const WriteShard& action) const {
    simulation.write(process, node, action.shard);
  }
  void operator()(const WriteManifest& action) const {
    simulation.write(process, node, action.manifest);
  }
  void operator()(const Measure& action) const {
    simulation.measure(process, node, action.round);
  }
  void operator()(const Apply& action) const {
    simulation.apply(process, node, action.round);
  }
  void operator()(const MakeSlots& action) const {
    simulation.make_slots(action);
  }
  void operator()(const Erase& action) const {
    if (!node.erased.emplace(action.slice, action.kid).second) {
      simulation.problem("erased twice: " + action.slice.text());
    }
  }
  void operator()(const CopyIn& action) const {
    ++simulation.statistics_[Count::kRegions];
    Segment& segment = simulation.segment(action.region);
    std::memcpy(
        reinterpret_cast<std::byte*>(segment.memory.data()) +
            action.region.offset,
        action.bytes.data(),
        action.bytes.size());
  }
  void operator()(const CopyOut& action) const {
    simulation.copy_out(process, node, action);
  }
  void operator()(const Return& action) const {
    if (process.has(node)) {
      node.app->returned(action);
    }
  }
};

void Simulation::perform(Process& process, Node& node) {
  for (Action& action : node.core().take()) {
    std::visit(Performer{*this, process, node}, action);
  }
}

void Simulation::heavy(
    Process& process,
    Node& node,
    double longest,
    const std::function<void(int half)>& work,
    const std::function<void()>& end) {
  work(0);
  const double some = random_.uniform(0, longest);
  const Time delay = random_.choose({0.0, longest / 10, some});
  at(delay, [=, this, &process, &node] {
    const auto rest = [=, this, &process, &node] {
      if (!process.alive || !process.has(node)) {
        return;
      }
      work(1);
      end();
      perform(process, node);
      if (node.app != nullptr) {
        node.app->run();
      }
    };
    if (process.paused) {
      process.backlog.emplace_back(rest);
    } else {
      rest();
    }
  });
}

Blobs Simulation::pushed_pieces(const Push& push) {
  if (!push.region) {
    return push.pieces;
  }
  const Segment& from = segment(*push.region);
  return {Blob(
      nullptr,
      reinterpret_cast<const std::byte*>(from.memory.data()) +
          push.region->offset,
      push.region->size)};
}

void Simulation::measure(Process& process, Node& node, const RoundPtr& round) {
  ++statistics_[Count::kSteps];
  const auto total = std::make_shared<double>(0);
  heavy(
      process,
      node,
      plan_.work,
      [this, round, total](int half) {
        Pushed pushed;
        for (const Push& push : round->pushes) {
          pushed.push_back(pushed_pieces(push));
        }
        const auto [begin, end] = range(round->num_elements, half);
        for (int64_t i = begin; i < end; ++i) {
          Element sum;
          for (const auto& pieces : pushed) {
            add(sum, element_at(pieces, i), 1, 1);
          }
          *total += dist::simulation::measure(sum);
        }
        round->partial = *total;
      },
      [this, &node, round] { node.server->on_measured(round, now_); });
}

void Update::begin() {
  Round& round = *round_;
  if (target_ != nullptr) {
    begin_in(*target_);
    return;
  }
  if (round.factor == 0) {
    round.result = round.source;
    return;
  }
  // Where the round is the only owner, nobody can see the value any more.
  auto* own = dynamic_cast<OwnValue*>(round.source.get());
  if (round.source.use_count() == 1 && own != nullptr && !own->has_readers()) {
    round.result = round.source;
    elements_ = &own->elements();
  } else {
    auto fresh = std::make_shared<OwnValue>(gather(round.source->pieces));
    elements_ = &fresh->elements();
    round.result = std::move(fresh);
  }
}

// A slice's two places in shared memory.
void Simulation::make_slots(const MakeSlots& action) {
  const auto count = static_cast<size_t>(num_elements(action.slots[0]->pieces));
  for (const ValuePtr& slot : action.slots) {
    const uint64_t name = ++num_segments_;
    const auto memory = std::make_shared<Segment>();
    memory->memory =
        slot->pieces.empty() ? Elements(count) : gather(slot->pieces);
    memory->kid = slot->kid;
    memory->version = slot->version;
    segments_[name] = memory;
    const size_t bytes = count * sizeof(Element);
    slot->region = Region{name, 0, bytes};
    // When the core has forgotten the value, its place is given to another,
    // which may well have the same kid and version.
    const std::shared_ptr<Elements> owner(
        &memory->memory, [memory](Elements* elements) {
          for (Element& element : *elements) {
            element.counts.fill(-1);
          }
        });
    slot->pieces = split(Blob(owner, owner->data(), bytes));
  }
}

void Simulation::note_applied(Node& node, const Round& round, bool has_thrown) {
  Applied applied{round.begun, round.slice, round.kid, {}, round.waited};
  for (const Push& push : round.pushes) {
    applied.ranks.push_back(push.rank);
  }
  node.trace.push_back(std::move(applied));
  note_round(node, round, has_thrown);
}

void Simulation::apply(Process& process, Node& node, const RoundPtr& round) {
  if (round->parts) {
    apply_list(process, node, round);
    return;
  }
  Segment* target = nullptr;
  if (round->target) {
    target = &segment(round->target->region.value_or(Region()));
  }
  const auto update = std::make_shared<Update>(round, target);
  if (logs_) {
    log("apply round " + std::to_string(round->version) + " of " +
        round->slice.text());
  }
  update->begin();
  heavy(
      process,
      node,
      plan_.work,
      [this, round, update](int half) {
        Pushed pushed;
        for (const Push& push : round->pushes) {
          pushed.push_back(pushed_pieces(push));
        }
        update->work(half, pushed);
      },
      [this, &node, round, update] {
        note_applied(node, *round, update->error().has_value());
        node.server->on_applied(round, update->error(), now_);
      });
}

Segment& Simulation::segment(const Region& region) {
  return *segments_.at(region.segment);
}

RegionPtr Simulation::allocate(
    const NodeId& worker,
    int64_t inc,
    int64_t count,
    size_t bytes) {
  if (random_.chance(0.15)) {
    return nullptr;
  }
  // The server may still read what an earlier incarnation has left.
  uint64_t name = 1;
  for (const int64_t part :
       {job_,
        static_cast<int64_t>(worker.store),
        static_cast<int64_t>(worker.number),
        inc,
        count}) {
    name = name * 1000 + static_cast<uint64_t>(part);
  }
  const auto segment = std::make_shared<Segment>();
  segment->memory.resize(bytes / sizeof(Element));
  segments_[name] = segment;
  // Whoever reads memory that was given back gets garbage.
  return {new Region{name, 0, bytes}, [segment](const Region* region) {
            for (Element& element : segment->memory) {
              element.counts.fill(-1);
            }
            delete region;
          }};
}

void Simulation::copy_out(Process& process, Node& node, const CopyOut& action) {
  const Region region = action.region;
  const int64_t opno = action.opno;
  const auto count = static_cast<int64_t>(region.size / sizeof(Element));
  const auto copy = std::make_shared<Elements>(static_cast<size_t>(count));
  heavy(
      process,
      node,
      plan_.copy,
      [this, region, count, copy](int half) {
        const Segment& from = segment(region);
        const auto [begin, end] = range(count, half);
        const auto* elements = reinterpret_cast<const Element*>(
            reinterpret_cast<const std::byte*>(from.memory.data()) +
            region.offset);
        for (int64_t i = begin; i < end; ++i) {
          (*copy)[static_cast<size_t>(i)] = elements[i];
        }
      },
      [this, &node, region, opno, copy] {
        const Segment& from = segment(region);
        ++statistics_[Count::kLeases];
        node.worker->on_copied(
            opno, make_blob(*copy), from.kid, from.version, now_);
      });
}

void Simulation::note_round(Node& node, const Round& round, bool has_thrown) {
  const uint64_t sum = checksum(round.result->pieces);
  if (!node.sums
           .emplace(std::make_tuple(round.slice, round.kid, round.version), sum)
           .second) {
    problem("two rounds make one version of " + round.slice.text());
  }
  ++statistics_[Count::kRounds];
  statistics_[Count::kSkipped] += round.factor == 0 ? 1 : 0;
  statistics_[Count::kThrown] += has_thrown ? 1 : 0;
  statistics_[Count::kInPlace] += round.result == round.source ? 1 : 0;
}

void Simulation::write(Process& process, Node& node, const Shard& shard) {
  std::vector<uint64_t> sums;
  for (const auto& [slice, shot] : shard.slices) {
    sums.push_back(checksum(shot->value->pieces));
    const auto known = node.sums.find({slice, shot->kid, shot->version});
    if (known != node.sums.end() && known->second != sums.back()) {
      problem("a snapshot has another value of " + slice.text());
    }
  }
  const size_t store = node.id.store;
  const int64_t number = shard.number;
  written(process, node, number, [this, store, shard, sums] {
    // The values are read as late as this. They may change meanwhile, if the
    // snapshot cannot be committed any more.
    File file{copy_of(shard), false};
    for (size_t i = 0; i < sums.size(); ++i) {
      const auto& pieces = file.shard.slices[i].second->value->pieces;
      file.is_torn = file.is_torn || checksum(pieces) != sums[i];
    }
    shards_[{store, shard.job, shard.number, shard.server}] = std::move(file);
  });
}

void Simulation::write(Process& process, Node& node, const Manifest& manifest) {
  const size_t store = node.id.store;
  const int64_t number = manifest.number;
  written(process, node, number, [this, store, manifest] {
    for (int server = 0; server < plan_.num_servers; ++server) {
      const auto file =
          shards_.find({store, manifest.job, manifest.number, server});
      if (file == shards_.end()) {
        problem("a manifest without all of its shards");
      } else if (file->second.is_torn) {
        problem("a value of a snapshot has changed");
      }
    }
    ++statistics_[Count::kSnapshots];
    manifests_[store] = manifest;
  });
}

// A file takes time; a crash before it has its name leaves nothing, nor does a
// disk that is full.
void Simulation::written(
    Process& process,
    Node& node,
    int64_t number,
    const std::function<void()>& store) {
  ++pending_;
  const Time delay = random_.choose({0.01, 0.3});
  const auto error = disk_.chance(full_chance_)
      ? std::optional<std::string>("full")
      : std::nullopt;
  at(delay, [=, this, &process, &node, job = job_] {
    if (job != job_) {
      return; // pending_ counts the new job's
    }
    --pending_;
    const auto rest = [=, this, &process, &node] {
      if (!process.alive) {
        return;
      }
      if (error) {
        ++statistics_[Count::kUnwritten];
        full_disks_.insert(node.id.number);
      } else {
        store();
      }
      if (!process.has(node)) {
        return;
      }
      if (node.server) {
        node.server->on_written(number, error, now_);
      } else {
        node.worker->on_written(number, error, now_);
      }
      perform(process, node);
      if (node.app != nullptr) {
        node.app->run();
      }
    };
    if (process.paused) {
      process.backlog.emplace_back(rest);
    } else {
      rest();
    }
  });
}

} // namespace torchkv::dist::simulation
