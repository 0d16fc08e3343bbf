#include "routes.h"

#include <algorithm>
#include <utility>

namespace torchkv::dist {

void Routes::heard(
    int32_t rank,
    int64_t incarnation,
    std::string_view identity) {
  auto& incarnations = routes_[rank];
  Route& route = incarnations[incarnation];
  if (route.identity == identity) {
    return;
  }
  auto& replaced = route.replaced;
  if (std::find(replaced.begin(), replaced.end(), identity) != replaced.end()) {
    return;
  }
  if (!route.identity.empty()) {
    replaced.push_back(std::move(route.identity));
    if (replaced.size() > kMaxReplaced) {
      replaced.erase(replaced.begin());
    }
  }
  route.identity = identity;
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
    route.replaced.push_back(std::move(route.identity));
    if (route.replaced.size() > kMaxReplaced) {
      route.replaced.erase(route.replaced.begin());
    }
    route.identity.clear();
  }
}

} // namespace torchkv::dist
