#include "routes.h"

#include <algorithm>
#include <utility>

namespace torchkv::dist {

void Routes::heard(
    int32_t rank,
    int64_t incarnation,
    std::string_view identity,
    Time now) {
  auto& incarnations = routes_[rank];
  Route& route = incarnations[incarnation];
  const bool is_free = route.identity.empty() || now - route.heard > kSilence;
  const auto& gone = route.gone;
  if (route.identity == identity) {
    route.heard = now;
  } else if (
      is_free && std::find(gone.begin(), gone.end(), identity) == gone.end()) {
    route.identity = identity;
    route.heard = now;
  }
  if (incarnations.size() > kMaxIncarnations) {
    incarnations.erase(incarnations.begin()); // perhaps this one
  }
}

const std::string* Routes::find(int32_t rank, int64_t incarnation) const {
  const auto known = routes_.find(rank);
  if (known == routes_.end()) {
    return nullptr;
  }
  const auto found = known->second.find(incarnation);
  if (found == known->second.end() || found->second.identity.empty()) {
    return nullptr;
  }
  return &found->second.identity;
}

void Routes::erase(int32_t rank, int64_t incarnation) {
  const auto known = routes_.find(rank);
  if (known == routes_.end()) {
    return;
  }
  const auto found = known->second.find(incarnation);
  if (found != known->second.end()) {
    Route& route = found->second;
    route.gone.push_back(std::move(route.identity));
    if (route.gone.size() > kMaxGone) {
      route.gone.erase(route.gone.begin());
    }
    route.identity.clear();
  }
}

} // namespace torchkv::dist
