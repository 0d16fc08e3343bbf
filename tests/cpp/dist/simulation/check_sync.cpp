#include <map>
#include <tuple>

#include "checker.h"

namespace torchkv::dist::simulation {

namespace {

using Kind = Instruction::Kind;

// A round: (key and number of its init, number of the push).
using At = std::pair<SliceId, int>;

struct PushOf {
  int uid;
  int weight;
  Poison poison;
};

// What the programs say.
class Expected {
 public:
  Expected(const std::vector<Program>& programs, int num_servers)
      : num_workers_(programs.size()), num_servers_(num_servers) {
    for (size_t rank = 0; rank < programs.size(); ++rank) {
      read(static_cast<int>(rank), programs[rank]);
    }
  }

  // The value of a slice after a round, as (first half, second half): an
  // updater that throws may have written only the first.
  using Halves = std::pair<Element, Element>;
  const Halves& value(const At& at) {
    if (const auto found = values_.find(at); found != values_.end()) {
      return found->second;
    }
    Halves halves;
    if (at.second > 0) {
      halves = value({at.first, at.second - 1});
      const auto factor = static_cast<int64_t>(clip(at));
      const Poison threw = poison(at);
      if (factor != 0 && threw != Poison::kBefore) {
        const auto rate = rates_.find(at);
        for (const auto& [rank, push] : rounds_.at(at)) {
          const Element element = pushed(push.uid, push.weight, push.poison);
          const int64_t now = rate == rates_.end() ? 0 : rate->second;
          add(halves.first, element, now, factor);
          if (threw != Poison::kHalf) {
            add(halves.second, element, now, factor);
          }
        }
      }
    }
    return values_.emplace(at, halves).first->second;
  }
  // What the updater did: the first rank's push counts.
  Poison poison(const At& at) const {
    if (clip(at) != 0) {
      for (const auto& [rank, push] : rounds_.at(at)) {
        if (push.poison != Poison::kNone) {
          return push.poison;
        }
      }
    }
    return Poison::kNone;
  }
  bool is_complete(const At& at) const {
    const auto found = rounds_.find(at);
    return at.second == 0 ||
        (found != rounds_.end() && found->second.size() == num_workers_);
  }
  // The round of a push; the last round before a pull.
  At at(int rank, int64_t pc, const Key& key) const {
    return before_.at({rank, pc, {key, 0}});
  }
  int64_t numel(const At& at) const {
    return specs_.at(at.first).total;
  }

 private:
  using Point = std::tuple<int, int64_t, SliceId>;

  void read(int rank, const Program& program);

  double clip(const At& at) const {
    const auto step = steps_.find(at);
    if (step == steps_.end()) {
      return 1;
    }
    std::map<SliceId, double> partials;
    for (const At& member : step->second) {
      Element sum;
      for (const auto& [rank, push] : rounds_.at(member)) {
        add(sum, pushed(push.uid, push.weight, push.poison), 1, 1);
      }
      const Key& key = member.first.key;
      const auto split = kSplitElements * int64_t{sizeof(Element)};
      const KeySpec& spec = specs_.at(member.first);
      for (const Place& at : place(key, spec, num_servers_, split)) {
        double& partial = partials[{key, at.index}];
        for (int64_t i = at.begin; i < at.end; ++i) {
          partial += measure(sum);
        }
      }
    }
    double total = 0;
    for (const auto& [slice, partial] : partials) {
      total += partial;
    }
    return factor_of(total);
  }

  const size_t num_workers_;
  const int num_servers_;
  std::map<At, std::map<int, PushOf>> rounds_; // by rank
  std::map<At, int64_t> rates_;
  std::map<At, std::vector<At>> steps_; // rounds that are clipped together
  std::map<SliceId, KeySpec> specs_;
  std::map<Point, At> before_;
  std::map<At, Halves> values_;
};

void Expected::read(int rank, const Program& program) {
  std::map<SliceId, std::pair<int, int>> counts; // inits, pushes
  int64_t rate = 1;
  for (size_t pc = 0; pc < program.size(); ++pc) {
    const Instruction& instruction = program[pc];
    if (instruction.kind == Kind::kConfig) {
      rate = instruction.rate;
    }
    std::vector<At> members;
    for (const Item& item : instruction.items) {
      auto& [init, number] = counts[{item.key, 0}];
      if (instruction.kind == Kind::kInit) {
        ++init;
        number = 0;
        KeySpec spec;
        spec.total = item.numel;
        spec.item_bytes = sizeof(Element);
        spec.whole = item.whole;
        specs_.try_emplace({item.key, init}, spec);
      }
      number += instruction.is_push() ? 1 : 0;
      const At at{{item.key, init}, number};
      if (instruction.is_push()) {
        rounds_[at][rank] = {item.uid, item.weight, item.poison};
        members.push_back(at);
        if (rank == 0) {
          rates_[at] = rate;
        }
      }
      const Point point{rank, static_cast<int64_t>(pc), {item.key, 0}};
      before_.emplace(point, at);
    }
    if (rank == 0 && instruction.two_phase) {
      for (const At& at : members) {
        steps_[at] = members;
      }
    }
  }
}

} // namespace

void Checker::sync_values(size_t store, const Entries& entries) {
  Expected expected(plan_.programs[store], plan_.num_servers);
  std::map<At, Error> told; // a round's outcome is the same for all ranks
  for (const Entry& entry : entries) {
    const Row& row = *entry.row;
    if (entry.item == nullptr || row.pc < 0) {
      continue;
    }
    const Key& key = entry.item->key;
    const At at = expected.at(row.rank, row.pc, key);
    if (entry.is_push() && row.t1) {
      const Poison threw = expected.poison(at);
      if (row.error && row.error->code == ErrorCode::kUpdater) {
        const Error& error = *row.error;
        // Lists with a push that is missing are of other rounds than others'.
        const bool is_same =
            !plan_.misuse || (error.slice && error.slice->key == key);
        if (is_same && !(told.try_emplace(at, error).first->second == error)) {
          bad("updater: not what others were told: " + text_of(row));
        }
        if (error.slice && error.slice->key == key &&
            error.text != text_of(threw)) {
          bad("updater: " + text_of(row));
        }
      } else if (!row.error && threw != Poison::kNone) {
        bad(std::string("swallowed: ") + text_of(threw) + ": " + text_of(row));
      }
    }
    if (!entry.has_values()) {
      continue;
    }
    if (!expected.is_complete(at)) {
      bad("sum: of a round that was never complete: " + text_of(row));
      continue;
    }
    const auto& [first, second] = expected.value(at);
    size_t count = 0;
    for (const Part* part : entry.parts) {
      const Asked& asked = part->asked;
      count += static_cast<size_t>(asked.length);
      bool is_right = part->version == at.second &&
          part->elements.size() == asked.elements.size();
      bool only_order = is_right;
      for (size_t i = 0; is_right && i < part->elements.size(); ++i) {
        const Element& wanted =
            asked.elements[i] < asked.length / 2 ? first : second;
        is_right = is_right && part->elements[i] == wanted;
        only_order = only_order && part->elements[i].counts == wanted.counts;
      }
      if (!is_right) {
        std::string text = only_order ? "order: " : "sum: ";
        text += text_of(row) + " not version " + std::to_string(at.second);
        for (const auto& [uid, amount] : contents(second)) {
          text += " #" + std::to_string(uid) + "*" + std::to_string(amount);
        }
        bad(text);
      }
    }
    if (count != static_cast<size_t>(expected.numel(at))) {
      bad("size: " + text_of(row));
    }
  }
}

} // namespace torchkv::dist::simulation
