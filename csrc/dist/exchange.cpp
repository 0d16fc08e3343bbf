#include "exchange.h"

#include <c10/util/StringUtil.h>

#include <algorithm>
#include <utility>

#include "errors.h"
#include "node.h"

namespace torchkv::dist {

Exchange::Exchange(
    std::shared_ptr<Rendezvous> rendezvous,
    std::string prefix,
    int32_t rank,
    int32_t num_ranks,
    double timeout)
    : rendezvous_(std::move(rendezvous)),
      prefix_(std::move(prefix)),
      rank_(rank),
      num_ranks_(num_ranks),
      timeout_(timeout),
      end_(Node::now() + timeout),
      attempt_(rendezvous_->add(key("refused", rank), 0)) {}

std::string Exchange::key(const char* name, int32_t rank) const {
  return c10::str(prefix_, name, '/', rank);
}

void Exchange::say(const char* name, const std::string& own) {
  rendezvous_->set(c10::str(key(name, rank_), '/', attempt_), own);
}

std::vector<std::string> Exchange::all(
    const char* name,
    const std::string& own) {
  say(name, own);
  std::vector<std::string> values;
  Error error;
  error.code = ErrorCode::kTimeout;
  for (int32_t rank = 0; rank < num_ranks_; ++rank) {
    const auto value = rendezvous_->get(
        c10::str(key(name, rank), '/', attempt_),
        std::max(end_ - Node::now(), 0.0));
    values.push_back(value.value_or(""));
    if (!value) {
      error.missing.push_back(rank);
    }
  }
  if (!error.missing.empty()) {
    throw_error("create", error, rank_, timeout_);
  }
  return values;
}

void Exchange::refuse() {
  rendezvous_->add(key("refused", rank_), 1);
}

} // namespace torchkv::dist
