// Routes: answers go where the latest request of an incarnation came from.
#include "dist/transport/routes.h"

#include <gtest/gtest.h>

#include <string>

namespace torchkv::dist {
namespace {

std::string route(const Routes& routes, int32_t rank, int64_t incarnation) {
  const std::string* const found = routes.find(rank, incarnation);
  return found == nullptr ? "none" : *found;
}

TEST(RoutesTest, AnIncarnationHasItsOwn) {
  Routes routes;
  EXPECT_EQ(route(routes, 1, 1), "none");
  routes.heard(1, 1, "a", 0);
  routes.heard(1, 2, "b", 0);
  routes.heard(2, 1, "c", 0);
  routes.heard(1, 1, "a", 0);
  EXPECT_EQ(route(routes, 1, 1), "a");
  EXPECT_EQ(route(routes, 1, 2), "b");
  EXPECT_EQ(route(routes, 2, 1), "c");
  EXPECT_EQ(route(routes, 2, 2), "none");
}

TEST(RoutesTest, AConnectionThatIsHeardFromKeepsItsRoute) {
  Routes routes;
  routes.heard(1, 1, "a", 0);
  routes.heard(1, 1, "stranger", 0.5);
  EXPECT_EQ(route(routes, 1, 1), "a");
  routes.heard(1, 1, "a", 1);
  routes.heard(1, 1, "stranger", 2);
  EXPECT_EQ(route(routes, 1, 1), "a");
}

TEST(RoutesTest, ASilentConnectionIsReplaced) {
  Routes routes;
  routes.heard(1, 1, "a", 0);
  routes.heard(1, 1, "b", 1);
  EXPECT_EQ(route(routes, 1, 1), "a");
  routes.heard(1, 1, "b", 2);
  EXPECT_EQ(route(routes, 1, 1), "b");
  routes.heard(1, 1, "a", 2.1); // late
  EXPECT_EQ(route(routes, 1, 1), "b");
  // Should "b" have been a stranger's.
  routes.heard(1, 1, "a", 4);
  EXPECT_EQ(route(routes, 1, 1), "a");
}

TEST(RoutesTest, AConnectionThatIsGoneDoesNotComeBack) {
  Routes routes;
  routes.erase(1, 1);
  routes.heard(1, 1, "a", 0);
  routes.erase(1, 1);
  EXPECT_EQ(route(routes, 1, 1), "none");
  routes.erase(1, 1);
  routes.heard(1, 1, "a", 0);
  EXPECT_EQ(route(routes, 1, 1), "none");
  routes.heard(1, 1, "b", 0);
  EXPECT_EQ(route(routes, 1, 1), "b");
}

TEST(RoutesTest, KeepsTheHighestIncarnations) {
  Routes routes;
  for (int64_t i = 1; i <= 1000; ++i) {
    routes.heard(1, i, "c" + std::to_string(i), 0);
  }
  EXPECT_EQ(route(routes, 1, 1000), "c1000");
  EXPECT_EQ(route(routes, 1, 997), "c997");
  EXPECT_EQ(route(routes, 1, 996), "none");
  routes.heard(1, 3, "old", 0);
  EXPECT_EQ(route(routes, 1, 3), "none");
  EXPECT_EQ(route(routes, 1, 997), "c997");
}

} // namespace
} // namespace torchkv::dist
