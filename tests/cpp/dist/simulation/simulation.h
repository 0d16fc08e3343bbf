#pragma once

#include <array>
#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <queue>
#include <set>
#include <string>
#include <tuple>
#include <unordered_map>
#include <utility>
#include <vector>

#include "dist/protocol/server.h"
#include "dist/protocol/worker.h"
#include "history.h"
#include "plan.h"
#include "random.h"

namespace torchkv::dist::simulation {

class App;

// One core's name in the simulation.
struct NodeId {
  size_t store = 0;
  Address::Role role = Address::Role::kServer;
  int number = 0;

  bool is_worker() const {
    return role == Address::Role::kWorker;
  }
  friend bool operator==(const NodeId& a, const NodeId& b) {
    return a.store == b.store && a.role == b.role && a.number == b.number;
  }
  friend bool operator<(const NodeId& a, const NodeId& b) {
    return std::tie(a.store, a.role, a.number) <
        std::tie(b.store, b.role, b.number);
  }
};

// A core, and what its driver keeps.
struct Node {
  NodeId id;
  std::unique_ptr<Server> server;
  std::unique_ptr<Worker> worker;
  App* app = nullptr; // of a worker
  // Of a server:
  std::vector<Applied> trace;
  std::set<std::pair<SliceId, int64_t>> erased; // with their kid
  // Checksums by (slice, kid, version).
  std::map<std::tuple<SliceId, int64_t, int64_t>, uint64_t> sums;

  Core& core() const {
    return server ? static_cast<Core&>(*server) : *worker;
  }
};

struct Process {
  int name = 0; // of the host
  int64_t number = 0; // differs between processes of one name
  bool alive = true;
  bool paused = false;
  std::vector<std::function<void()>> backlog;
  std::vector<Node*> nodes;

  Node* find(const NodeId& id) const {
    for (Node* node : nodes) {
      if (node->id == id) {
        return node;
      }
    }
    return nullptr;
  }
  bool has(const Node& node) const {
    return find(node.id) == &node;
  }
  bool has_role(Address::Role role) const {
    for (const Node* node : nodes) {
      if (node->id.role == role) {
        return true;
      }
    }
    return false;
  }
};

// Memory that processes of one host share.
struct Segment {
  Elements memory;
  int64_t kid = 0; // the stamp
  int64_t version = 0;
};

enum class Count : uint8_t {
  kMessages,
  kCalls,
  kRejoins,
  kRestarts,
  kResumed, // from a snapshot
  kRounds,
  kInPlace, // rounds
  kSkipped, // rounds with factor 0
  kThrown, // rounds
  kSteps, // rounds in two phases
  kRegions, // pushes in shared memory
  kLeases, // copied out
  kStalls, // pushes that waited for memory
  kSnapshots,
  kUnwritten, // files of snapshots
  kQueries, // pulls of some elements
  kLists, // rounds of several slices
};
constexpr int kNumCounts = static_cast<int>(Count::kLists) + 1;
const char* name(Count count);

// How often things have happened.
struct Statistics {
  std::array<int64_t, kNumCounts> counts{};

  int64_t& operator[](Count count) {
    return counts.at(static_cast<size_t>(count));
  }
  int64_t operator[](Count count) const {
    return counts.at(static_cast<size_t>(count));
  }
};

// Virtual time, a faulty network, processes, files, and the programs that the
// workers run. Everything that happens follows from (seed, mode, profile).
class Simulation {
 public:
  // Keeps the last `num_logged` events.
  Simulation(uint64_t seed, Mode mode, Profile profile, size_t num_logged = 0);
  ~Simulation();
  Simulation(const Simulation&) = delete;
  Simulation& operator=(const Simulation&) = delete;

  void run();

  // What has happened, for the checker.
  const Plan& plan() const {
    return plan_;
  }
  const std::deque<Row>& history() const {
    return history_;
  }
  const std::vector<App*>& apps() const {
    return apps_;
  }
  const std::map<std::pair<size_t, int>, Node*>& servers() const {
    return servers_;
  }
  // By number; the processes of the last job.
  const std::set<int>& faulty_workers() const {
    return faulty_workers_;
  }
  const std::set<int>& faulty_servers() const {
    return faulty_servers_;
  }
  // Ranks that have given up after an error.
  const std::set<int>& failed() const {
    return failed_;
  }
  // What the simulated driver itself has found.
  const std::vector<std::string>& problems() const {
    return problems_;
  }
  const std::deque<std::string>& events() const {
    return log_;
  }
  Time now() const {
    return now_;
  }
  int64_t job() const {
    return job_;
  }
  // Of the nodes that could not write a file.
  const std::set<int>& full_disks() const {
    return full_disks_;
  }
  const Statistics& statistics() const {
    return statistics_;
  }

 private:
  friend class App;
  friend struct Performer;

  struct Event {
    Time at;
    int64_t number;
    std::function<void()> run;
    friend bool operator<(const Event& a, const Event& b) {
      return a.at != b.at ? a.at > b.at : a.number > b.number;
    }
  };
  using FramePtr = std::shared_ptr<Frame>;
  struct Flight {
    bool dead = false;
    bool done = false;
    bool beat = false;
    NodeId target;
    FramePtr frame;
  };
  struct Link {
    Time last = 0;
    std::vector<std::shared_ptr<Flight>> flying;
  };
  struct Partition {
    Time until = 0;
    bool keeps = false; // delays messages, loses none
  };

  // Time.
  void at(Time delay, std::function<void()> run);
  int64_t tick() {
    return ++order_;
  }
  bool finished() const;
  void log(const std::string& what);
  void problem(const std::string& what);

  // Processes.
  Config config(size_t store, uint64_t digest) const;
  Process& add_process(int name);
  void start(size_t pc, const Manifest* restored);
  void start_servers(size_t store, const Manifest* restored);
  Process& host(size_t store, Address::Role role, int number) const;
  int host_name(const NodeId& id) const;
  void ticks(Process& process);
  void timers(Process& process);
  void wake(Process& process, Node& node);

  // The driver.
  void perform(Process& process, Node& node);
  // Work beside the core, half now and half later. A stopped process stops in
  // between.
  void heavy(
      Process& process,
      Node& node,
      double longest,
      const std::function<void(int half)>& work,
      const std::function<void()>& end);
  void measure(Process& process, Node& node, const RoundPtr& round);
  void apply(Process& process, Node& node, const RoundPtr& round);
  void apply_list(Process& process, Node& node, const RoundPtr& round);
  void note_applied(Node& node, const Round& round, bool has_thrown);
  void note_round(Node& node, const Round& round, bool has_thrown);
  void make_slots(const MakeSlots& action);
  void copy_out(Process& process, Node& node, const CopyOut& action);
  void write(Process& process, Node& node, const Shard& shard);
  void write(Process& process, Node& node, const Manifest& manifest);
  void written(
      Process& process,
      Node& node,
      int64_t number,
      const std::function<void()>& store);
  // A shard as it would be read from disk: nobody else has its values.
  static Shard copy_of(const Shard& shard);
  Segment& segment(const Region& region);
  // The `count`th of this incarnation of the worker; null: it is on another
  // host.
  RegionPtr allocate(
      const NodeId& worker,
      int64_t inc,
      int64_t count,
      size_t bytes);
  Blobs pushed_pieces(const Push& push);

  // The network.
  void send(Process& process, Node& source, Send action);
  void send_between(
      Process& process,
      const NodeId& target,
      const FramePtr& frame);
  void break_link(Link& link);
  void deliver(const NodeId& target, const FramePtr& frame);
  void handle(Process& process, const NodeId& target, const FramePtr& frame);

  // Faults.
  void plan_faults();
  void blame(const Process& process);
  void crash(Process& process);
  void replace(Process& process);
  void kill(Process& process);
  void notice(Process& process, Node& node, int number, int64_t job);
  void believe_lost(Process& process, Node& node, int number);
  void pause(Process& process, Time duration, bool replaced);
  void resume(Process& process);
  void partition(const Process& a, const Process& b, Time duration, bool keeps);
  void restart();
  void come_back(Process& process, App& old);

  const Plan plan_;
  const size_t num_logged_;
  const bool logs_;
  Random random_; // of faults and delays
  Random disk_; // which files cannot be written
  Time now_ = 0;
  int64_t order_ = 0;
  int64_t num_events_ = 0;
  std::priority_queue<Event> events_;
  std::deque<std::string> log_;
  std::vector<std::string> problems_;

  std::deque<Row> history_;
  std::vector<std::unique_ptr<Process>> all_processes_;
  std::vector<std::unique_ptr<Node>> all_nodes_;
  std::vector<std::unique_ptr<App>> all_apps_;
  // Of this job:
  std::vector<Process*> processes_;
  std::vector<Process*> hosts_;
  std::vector<App*> apps_;
  std::map<std::pair<size_t, int>, Node*> servers_; // by store, number

  struct File {
    Shard shard;
    bool is_torn = false;
  };
  // By (store, job, number, server).
  std::map<std::tuple<size_t, int64_t, int64_t, int>, File> shards_;
  std::map<size_t, Manifest> manifests_; // the latest of each store
  std::unordered_map<uint64_t, std::shared_ptr<Segment>> segments_;
  uint64_t num_segments_ = 0;

  std::map<std::pair<int64_t, NodeId>, Link> links_; // by process, target
  std::map<std::pair<int, int>, Partition> partitions_; // by hosts
  double jitter_ = 0;
  double break_chance_ = 0;
  double full_chance_ = 0; // of a file
  std::set<int> full_disks_;

  int64_t job_ = 1;
  bool restarting_ = false;
  int pending_ = 0; // files being written
  std::map<NodeId, int64_t> incs_;
  std::set<int> faulty_workers_;
  std::set<int> faulty_servers_;
  std::set<int> failed_;
  Statistics statistics_;
};

} // namespace torchkv::dist::simulation
