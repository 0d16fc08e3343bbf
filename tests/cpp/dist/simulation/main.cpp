// Runs the cores of the distributed store in a simulated network.
//
//   torchkv_simulate [--seeds N] [--start S] [--mode M] [--profile P] [--jobs
//   N]
//     many seeds, one line per cell of modes and profiles
//   torchkv_simulate --one SEED MODE PROFILE [-v]
//     the same as that seed did then, message for message

#include <atomic>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <exception>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "checker.h"

namespace torchkv::dist::simulation {
namespace {

struct Cell {
  Mode mode;
  Profile profile;
};

struct Options {
  uint64_t start = 0;
  uint64_t seeds = 50;
  int jobs = 1;
  std::vector<Cell> cells;
  bool one = false;
  bool verbose = false;
  bool first = false; // ends with the first that fails
};

struct Totals {
  int64_t runs = 0;
  int64_t failed = 0;
};

std::vector<std::string> check(Simulation& simulation) {
  try {
    simulation.run();
    return Checker(simulation).check();
  } catch (const std::exception& error) {
    std::vector<std::string> problems = simulation.problems();
    problems.push_back(std::string("exception: ") + error.what());
    return problems;
  }
}

// Runs it again, now with a log.
int replay(uint64_t seed, const Cell& cell, bool verbose) {
  Simulation simulation(
      seed, cell.mode, cell.profile, verbose ? SIZE_MAX : size_t{200});
  const auto problems = check(simulation);
  std::printf("%s", simulation.plan().text().c_str());
  if (verbose || !problems.empty()) {
    for (const std::string& event : simulation.events()) {
      std::printf("%s\n", event.c_str());
    }
  }
  if (verbose) {
    for (const Row& row : simulation.history()) {
      std::printf("%s\n", text_of(row).c_str());
    }
  }
  for (const std::string& problem : problems) {
    std::printf("PROBLEM %s\n", problem.c_str());
  }
  std::printf(
      "%s at %.4f\n", problems.empty() ? "clean" : "failed", simulation.now());
  return problems.empty() ? 0 : 1;
}

class Campaign {
 public:
  explicit Campaign(const Options& options)
      : options_(options), totals_(options.cells.size()) {}

  int run() {
    const auto begin = std::chrono::steady_clock::now();
    std::vector<std::thread> threads;
    threads.reserve(static_cast<size_t>(options_.jobs));
    for (int i = 0; i < options_.jobs; ++i) {
      threads.emplace_back([this] { work(); });
    }
    for (std::thread& thread : threads) {
      thread.join();
    }
    const std::chrono::duration<double> took =
        std::chrono::steady_clock::now() - begin;
    return print(took.count());
  }

 private:
  void work() {
    const size_t count = options_.cells.size();
    for (;;) {
      const uint64_t i = next_++;
      if (i >= options_.seeds * count || (options_.first && failed_)) {
        return;
      }
      run_one(options_.start + i / count, i % count);
    }
  }

  void run_one(uint64_t seed, size_t cell_index) {
    const Cell& cell = options_.cells[cell_index];
    Simulation simulation(seed, cell.mode, cell.profile);
    const auto problems = check(simulation);
    const std::lock_guard<std::mutex> lock(mutex_);
    Totals& totals = totals_[cell_index];
    ++totals.runs;
    for (size_t i = 0; i < kNumCounts; ++i) {
      statistics_.counts.at(i) += simulation.statistics().counts.at(i);
    }
    if (problems.empty()) {
      return;
    }
    ++totals.failed;
    std::printf(
        "FAIL %llu %s %s: %s\n",
        static_cast<unsigned long long>(seed),
        name(cell.mode),
        name(cell.profile),
        problems[0].c_str());
    std::fflush(stdout);
    if (!failed_) {
      failed_ = true;
      first_seed_ = seed;
      first_cell_ = cell;
    }
  }

  int print(double seconds) const {
    Totals sum;
    for (size_t i = 0; i < totals_.size(); ++i) {
      const Totals& totals = totals_[i];
      std::printf(
          "%-7s %-8s %6lld runs, %lld failed\n",
          name(options_.cells[i].mode),
          name(options_.cells[i].profile),
          static_cast<long long>(totals.runs),
          static_cast<long long>(totals.failed));
      sum.runs += totals.runs;
      sum.failed += totals.failed;
    }
    std::printf("%lld runs", static_cast<long long>(sum.runs));
    for (int i = 0; i < kNumCounts; ++i) {
      const auto count = static_cast<Count>(i);
      std::printf(
          ", %lld %s", static_cast<long long>(statistics_[count]), name(count));
    }
    std::printf(
        "; %lld failed; %.0f s\n", static_cast<long long>(sum.failed), seconds);
    if (failed_ && !options_.first) {
      std::printf("\nthe first that failed, again:\n");
      replay(first_seed_, first_cell_, false);
    }
    return sum.failed == 0 ? 0 : 1;
  }

  const Options& options_;
  std::atomic<uint64_t> next_{0};
  std::mutex mutex_; // guards everything below
  std::vector<Totals> totals_; // by cell
  Statistics statistics_;
  std::atomic<bool> failed_{false};
  uint64_t first_seed_ = 0;
  Cell first_cell_{};
};

std::vector<Cell> cells(const std::string& mode, const std::string& profile) {
  std::vector<Cell> found;
  for (int m = 0; m < kNumModes; ++m) {
    for (int p = 0; p < kNumProfiles; ++p) {
      const Cell cell{static_cast<Mode>(m), static_cast<Profile>(p)};
      const bool exists =
          cell.mode == Mode::kSync || cell.profile != Profile::kRestart;
      if (exists && (mode.empty() || mode == name(cell.mode)) &&
          (profile.empty() || profile == name(cell.profile))) {
        found.push_back(cell);
      }
    }
  }
  return found;
}

[[noreturn]] void usage() {
  std::fprintf(
      stderr,
      "usage: torchkv_simulate [--seeds N] [--start S] [--mode M] "
      "[--profile P] [--jobs N] [--first]\n"
      "       torchkv_simulate --one SEED MODE PROFILE [-v]\n");
  std::exit(2);
}

uint64_t number_of(const std::string& text) {
  if (text.empty() ||
      text.find_first_not_of("0123456789") != std::string::npos) {
    usage();
  }
  return std::strtoull(text.c_str(), nullptr, 10);
}

Options parse(const std::vector<std::string>& arguments) {
  Options options;
  std::string mode;
  std::string profile;
  for (size_t i = 0; i < arguments.size(); ++i) {
    const auto next = [&] {
      if (++i == arguments.size()) {
        usage();
      }
      return arguments[i];
    };
    if (arguments[i] == "--seeds") {
      options.seeds = number_of(next());
    } else if (arguments[i] == "--start") {
      options.start = number_of(next());
    } else if (arguments[i] == "--jobs") {
      options.jobs = static_cast<int>(number_of(next()));
    } else if (arguments[i] == "--mode") {
      mode = next();
    } else if (arguments[i] == "--profile") {
      profile = next();
    } else if (arguments[i] == "--one") {
      options.one = true;
      options.start = number_of(next());
      mode = next();
      profile = next();
    } else if (arguments[i] == "--first") {
      options.first = true;
    } else if (arguments[i] == "-v") {
      options.verbose = true;
    } else {
      usage();
    }
  }
  options.cells = cells(mode, profile);
  if (options.cells.empty() || options.jobs < 1) {
    usage();
  }
  return options;
}

} // namespace
} // namespace torchkv::dist::simulation

int main(int argc, char** argv) {
  using namespace torchkv::dist::simulation;
  const Options options = parse({argv + 1, argv + argc});
  if (options.one) {
    return replay(options.start, options.cells[0], options.verbose);
  }
  return Campaign(options).run();
}
