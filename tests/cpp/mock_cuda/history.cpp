#include "history.h"

#include <c10/util/Exception.h>

#include <algorithm>
#include <iterator>

namespace torchkv::mock_cuda {
namespace {

bool is_covered(const WorkPtr& work, const Clock& clock) {
  return work == nullptr || clock.covers(work->actor, work->number);
}

} // namespace

void History::split(uintptr_t at) {
  auto it = cells_.lower_bound(at);
  if (it == cells_.begin()) {
    return;
  }
  --it;
  if (it->second.end > at) {
    Cell right = it->second;
    it->second.end = at;
    cells_.emplace(at, std::move(right));
  }
}

void History::access(
    uintptr_t begin,
    uintptr_t end,
    bool is_write,
    const WorkPtr& work,
    const Clock& clock) {
  split(begin);
  split(end);
  const auto check = [&](const WorkPtr& earlier, const char* verb) {
    TORCH_CHECK(
        is_covered(earlier, clock),
        "mock_cuda: ",
        work->text(),
        is_write ? " writes" : " reads",
        " memory that ",
        earlier->text(),
        verb,
        ", and nothing orders the two");
  };
  for (uintptr_t at = begin; at < end;) {
    auto it = cells_.lower_bound(at);
    if (it == cells_.end() || it->first > at) {
      const uintptr_t gap_end =
          it == cells_.end() ? end : std::min(end, it->first);
      it = cells_.emplace(at, Cell{gap_end, nullptr, {}}).first;
    }
    Cell& cell = it->second;
    check(cell.write, " writes");
    if (is_write) {
      for (const auto& read : cell.reads) {
        check(read, " reads");
      }
      cell.reads.clear();
      cell.write = work;
    } else {
      const auto same_actor = [&](const WorkPtr& read) {
        return read->actor == work->actor;
      };
      cell.reads.erase(
          std::remove_if(cell.reads.begin(), cell.reads.end(), same_actor),
          cell.reads.end());
      cell.reads.push_back(work);
    }
    at = cell.end;
  }
}

WorkPtr History::uncovered(const Clock& clock) const {
  for (const auto& [begin, cell] : cells_) {
    if (!is_covered(cell.write, clock)) {
      return cell.write;
    }
    for (const auto& read : cell.reads) {
      if (!is_covered(read, clock)) {
        return read;
      }
    }
  }
  return nullptr;
}

} // namespace torchkv::mock_cuda
