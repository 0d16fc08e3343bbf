#include "dist/deferred_errors.h"

#include <gtest/gtest.h>

#include <string>
#include <vector>

namespace torchkv::dist {
namespace {

Error error(const std::string& text) {
  Error result;
  result.code = ErrorCode::kUpdater;
  result.text = text;
  return result;
}

std::string taken(DeferredErrors& errors, const std::vector<int64_t>& ids) {
  Keys keys;
  for (const int64_t id : ids) {
    keys.list.emplace_back(id);
  }
  const auto found = errors.take(&keys);
  return found ? found->text : "none";
}

TEST(DeferredErrorsTest, EachKeyKeepsItsFirst) {
  DeferredErrors errors;
  constexpr int64_t kMany = 1000;
  for (int64_t id = 0; id < kMany; ++id) {
    errors.add(error(std::to_string(id)), {Key(id)});
    errors.add(error("later"), {Key(id)});
  }
  for (int64_t id = kMany; id-- > 0;) {
    EXPECT_EQ(taken(errors, {id}), std::to_string(id));
    EXPECT_EQ(taken(errors, {id}), "none");
  }
  EXPECT_FALSE(errors.take(nullptr));
}

TEST(DeferredErrorsTest, AnErrorOfAListIsTakenOnce) {
  DeferredErrors errors;
  errors.add(error("list"), {Key(1), Key(2), Key(3)});
  errors.add(error("more"), {Key(3), Key(4)});
  EXPECT_EQ(taken(errors, {5}), "none");
  EXPECT_EQ(taken(errors, {2, 4}), "list"); // the earlier
  EXPECT_EQ(taken(errors, {1, 2, 3}), "none");
  EXPECT_EQ(taken(errors, {4}), "more");
}

TEST(DeferredErrorsTest, WithoutKeysTheEarliestIsTaken) {
  DeferredErrors errors;
  errors.add(error("options"), {});
  errors.add(error("options again"), {}); // one is kept
  errors.add(error("push"), {Key(1)});
  EXPECT_EQ(taken(errors, {1}), "push");
  errors.add(error("push"), {Key(2)});
  EXPECT_EQ(errors.take(nullptr)->text, "options");
  EXPECT_EQ(errors.take(nullptr)->text, "push");
  EXPECT_FALSE(errors.take(nullptr));
}

} // namespace
} // namespace torchkv::dist
