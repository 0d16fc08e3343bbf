// torchkv_replay FILE...: gives the events of tests/dist/traces.py to the C++
// cores. Their actions must be those of the trace, in the same order.
#include <cstdint>
#include <deque>
#include <exception>
#include <fstream>
#include <iostream>
#include <memory>
#include <string>
#include <vector>

#include "replay_cores.h"

namespace torchkv::dist::replay {
namespace {

// The lines before a difference that are shown.
constexpr size_t kShown = 12;
constexpr int kMaxDifferences = 5;

struct Totals {
  int64_t cores = 0;
  int64_t events = 0;
  int64_t actions = 0;
  int differences = 0;
};

struct Line {
  int64_t number = 0;
  std::string text;
};

// The lines of a file, of which the next can be looked at.
class Reader {
 public:
  explicit Reader(const std::string& path) : file_(path) {
    if (!file_) {
      throw std::runtime_error("cannot read " + path);
    }
    advance();
  }
  bool done() const {
    return done_;
  }
  bool next_is(const std::string& start) const {
    return !done_ && next_.text.rfind(start, 0) == 0;
  }
  Line take() {
    Line line = next_;
    advance();
    return line;
  }

 private:
  void advance() {
    done_ = !std::getline(file_, next_.text);
    ++next_.number;
  }

  std::ifstream file_;
  Line next_;
  bool done_ = false;
};

// Where two lines begin to differ: from the last blank before it.
std::string from_difference(const std::string& line, const std::string& other) {
  size_t at = 0;
  while (at < line.size() && at < other.size() && line[at] == other[at]) {
    ++at;
  }
  const size_t blank = line.rfind(' ', at);
  return line.substr(blank == std::string::npos ? 0 : blank + 1, 120);
}

// One core; stops at the first difference.
class Comparison {
 public:
  Comparison(Reader& reader, std::string path, Totals& totals)
      : reader_(reader), path_(std::move(path)), totals_(totals) {}

  void run() {
    const Line core = take();
    const std::string restored =
        reader_.next_is("restored ") ? take().text : std::string();
    const auto replayed = make_core(core.text, restored);
    ++totals_.cores;
    while (reader_.next_is("! ") && !differs_) {
      const Line event = take();
      ++totals_.events;
      compare(event, replayed->replay(event.text.substr(2)));
    }
    while (differs_ && !reader_.done() && !reader_.next_is("core ")) {
      reader_.take();
    }
  }

 private:
  void compare(const Line& event, const std::vector<std::string>& actions) {
    for (const auto& action : actions) {
      const bool is_action = !reader_.done() && !reader_.next_is("! ") &&
          !reader_.next_is("core ");
      const std::string wanted =
          is_action ? take().text : std::string("no more action");
      if (wanted != action) {
        report(event, wanted, action);
        return;
      }
      ++totals_.actions;
    }
    if (!reader_.done() && !reader_.next_is("! ") &&
        !reader_.next_is("core ")) {
      report(event, take().text, "no more action");
    }
  }

  void report(
      const Line& event,
      const std::string& model,
      const std::string& core) {
    differs_ = true;
    ++totals_.differences;
    std::cout << path_ << ":" << event.number << ": the actions differ\n";
    for (const auto& line : last_) {
      std::cout << "  " << line.number << " " << line.text << "\n";
    }
    std::cout << "  model: " << model << "\n  C++:   " << core
              << "\n  model: ..." << from_difference(model, core)
              << "\n  C++:   ..." << from_difference(core, model) << "\n";
  }

  Line take() {
    Line line = reader_.take();
    last_.push_back(line);
    if (last_.size() > kShown) {
      last_.pop_front();
    }
    return line;
  }

  Reader& reader_;
  const std::string path_;
  Totals& totals_;
  std::deque<Line> last_;
  bool differs_ = false;
};

int run(const std::vector<std::string>& paths) {
  Totals totals;
  for (const auto& path : paths) {
    Reader reader(path);
    while (!reader.done() && totals.differences < kMaxDifferences) {
      if (!reader.next_is("core ")) {
        throw std::runtime_error(path + ": expected a core");
      }
      Comparison(reader, path, totals).run();
    }
  }
  std::cout << totals.cores << " cores, " << totals.events << " events, "
            << totals.actions << " actions, " << totals.differences
            << " differences\n";
  return totals.differences == 0 && totals.cores > 0 ? 0 : 1;
}

} // namespace
} // namespace torchkv::dist::replay

int main(int argc, char** argv) {
  try {
    return torchkv::dist::replay::run({argv + 1, argv + argc});
  } catch (const std::exception& error) {
    std::cout << "torchkv_replay: " << error.what() << "\n";
    return 2;
  }
}
