#include <algorithm>
#include <map>
#include <optional>
#include <set>

#include "checker.h"

namespace torchkv::dist::simulation {

namespace {

using Kind = Instruction::Kind;
using Slice = std::pair<SliceId, int64_t>; // with its kid

} // namespace

void Checker::async_values(size_t store, Entries entries) {
  std::map<std::pair<int, int64_t>, std::map<SliceId, int64_t>> inits; // kids
  std::map<Slice, std::map<int, const Entry*>> pushes; // by number
  std::map<Slice, std::vector<std::pair<const Entry*, const Part*>>> pulls;
  std::map<int, int> barriers;
  int issued = 0;
  for (Entry& entry : entries) {
    const Row& row = *entry.row;
    entry.phase = barriers[row.rank];
    entry.rates = issued;
    auto& mine = inits[{row.rank, row.inc}];
    if (entry.kind == Kind::kBarrier) {
      ++barriers[row.rank];
    } else if (entry.kind == Kind::kConfig) {
      ++issued;
    } else if (entry.kind == Kind::kInit && row.succeeded()) {
      for (auto at = mine.begin(); at != mine.end();) {
        at = at->first.key == entry.item->key ? mine.erase(at) : ++at;
      }
      for (const Part* part : entry.parts) {
        mine[part->slice] = part->kid;
      }
    } else if (entry.is_push()) {
      const int uid = entry.item->uid;
      if (entry.item->poison != Poison::kNone && row.succeeded()) {
        bad("swallowed: " + text_of(row));
      }
      for (const auto& [slice, kid] : mine) {
        if (!(slice.key == entry.item->key)) {
          continue;
        }
        // Of two processes of one rank, the older may have been refused.
        const Entry*& known = pushes[{slice, kid}][uid];
        if (known == nullptr || row.succeeded() || known->row->inc <= row.inc) {
          known = &entry;
        }
      }
    }
    if (entry.has_values()) {
      for (const Part* part : entry.parts) {
        pulls[{part->slice, part->kid}].emplace_back(&entry, part);
      }
    }
  }
  std::map<Slice, Contents> finals;
  for (const auto& [at, node] : simulation_.servers()) {
    if (at.first != store) {
      continue;
    }
    for (const auto& view : node->server->slices()) {
      if (!view.busy) {
        const Elements elements = gather(view.value->pieces);
        if (std::any_of(elements.begin(), elements.end(), [&](const auto& x) {
              return x != elements[0];
            })) {
          bad("torn at the end: " + view.slice.text());
        }
        finals[{view.slice, view.kid}] = contents(elements.at(0));
      }
    }
  }
  const auto has = [](const Contents& contents, int uid) {
    return std::any_of(contents.begin(), contents.end(), [&](const auto& x) {
      return x.first == uid;
    });
  };
  const bool is_fair =
      plan_.profile == Profile::kCalm || plan_.profile == Profile::kFlaky;
  for (const auto& [slice, pushed] : pushes) {
    // Of what is in a value, everything was pushed, and added once.
    const auto once = [&, &slice = slice, &pushed = pushed](
                          const Contents& contents, const Row* pull) {
      for (const auto& [uid, amount] : contents) {
        const auto at = pushed.find(uid);
        if (at == pushed.end() ||
            (pull != nullptr && at->second->row->start > pull->end)) {
          bad("ghost: push " + std::to_string(uid) + " in " +
              slice.first.text());
          continue;
        }
        const Entry& push = *at->second;
        const auto end = kRates.begin() + issued + 1;
        const auto rate =
            std::find(kRates.begin(), end, amount / push.item->weight);
        if (amount % push.item->weight != 0 || rate == end) {
          bad("twice: push " + std::to_string(uid) + " in " +
              slice.first.text() + " added " + std::to_string(amount));
        } else if (
            push.row->rank == 0 && push.row->inc == 1 &&
            rate - kRates.begin() < push.rates) {
          bad("rate: push " + std::to_string(uid) + " in " +
              slice.first.text() + " with " + std::to_string(*rate));
        }
      }
    };
    if (const auto end = finals.find(slice); end != finals.end()) {
      for (const auto& [uid, push] : pushed) {
        if (push->row->succeeded() && !has(end->second, uid)) {
          bad("lost: push " + std::to_string(uid) + " of " +
              slice.first.text());
        }
      }
      once(end->second, nullptr);
    }
    std::vector<std::pair<int64_t, Contents>> observed; // by version
    for (const auto& [entry, part] : pulls[slice]) {
      const Row& row = *entry->row;
      const Contents contents = content(*part, row);
      once(contents, &row);
      for (const auto& [uid, push] : pushed) {
        const Row& other = *push->row;
        // Of a push whose process has died before the answer, nobody knows
        // whether the updater threw.
        const bool may_throw = !other.t1 && plan_.poison != 0;
        const bool own = other.rank == row.rank && other.inc == row.inc &&
            other.start <= row.start && !other.error && !may_throw;
        const bool before = (other.succeeded() && other.end < row.start) ||
            (is_fair && push->phase < entry->phase && !other.error);
        if ((own || before) && !has(contents, uid)) {
          bad("unseen: push " + std::to_string(uid) + " in " + text_of(row));
        }
      }
      observed.emplace_back(part->version, contents);
    }
    std::sort(
        observed.begin(), observed.end(), [](const auto& a, const auto& b) {
          return a.first < b.first;
        });
    for (size_t i = 1; i < observed.size(); ++i) {
      for (const auto& [uid, amount] : observed[i - 1].second) {
        if (!has(observed[i].second, uid)) {
          bad("shrunk: push " + std::to_string(uid) + " of " +
              slice.first.text());
        }
      }
    }
  }
  for (const auto& [slice, observed] : pulls) {
    if (pushes.count(slice) == 0) {
      for (const auto& [entry, part] : observed) {
        for (const auto& [uid, amount] : content(*part, *entry->row)) {
          bad("ghost: push " + std::to_string(uid) + " in " +
              text_of(*entry->row));
        }
      }
    }
  }
}

} // namespace torchkv::dist::simulation
