// KeyTable: all-or-nothing inserts and erases, one kind of keys, order, close.
#include "store/key_table.h"

#include <gtest/gtest.h>

#include <random>
#include <set>
#include <string>
#include <vector>

#include "core/errors.h"

namespace torchkv {
namespace {

Entries make(const std::vector<Key>& keys) {
  Entries entries;
  for (const auto& key : keys) {
    entries.push_back(c10::make_intrusive<Entry>(key, Meta()));
  }
  return entries;
}

std::vector<std::string> order(const KeyTable& table) {
  std::vector<std::string> result;
  for (const auto& entry : table.entries("keys")) {
    result.push_back(entry->key.context());
  }
  return result;
}

TEST(KeyTableTest, FindsWhatWasInserted) {
  KeyTable table;
  const Entries entries = make({5, 7, 9});
  table.insert("init", entries);
  const Entries found = table.find("push", {9, 5, 9});
  ASSERT_EQ(found.size(), 3);
  EXPECT_EQ(found[0], entries[2]);
  EXPECT_EQ(found[1], entries[0]);
  EXPECT_EQ(found[2], entries[2]);
  EXPECT_EQ(table.summary().num_keys, 3);
  EXPECT_NE(table.find_one("in", 7), nullptr);
  EXPECT_EQ(table.find_one("in", 8), nullptr);
}

TEST(KeyTableTest, InsertIsAllOrNothing) {
  KeyTable table;
  table.insert("init", make({1}));
  EXPECT_THROW(table.insert("init", make({2, 3, 1})), c10::ValueError);
  EXPECT_THROW(table.insert("init", make({2, 3, 2})), c10::ValueError);
  EXPECT_THROW(table.insert("init", make({2, "w"})), c10::TypeError);
  EXPECT_EQ(order(table), (std::vector<std::string>{"(key 1)"}));
  table.insert("init", make({3, 2}));
  EXPECT_EQ(
      order(table),
      (std::vector<std::string>{"(key 1)", "(key 3)", "(key 2)"}));
}

TEST(KeyTableTest, ARejectedFirstInsertDoesNotFixTheKind) {
  KeyTable table;
  EXPECT_THROW(table.insert("init", make({"w", 1})), c10::TypeError);
  EXPECT_EQ(table.summary().kind, std::nullopt);
  table.insert("init", make({1}));
  EXPECT_EQ(table.summary().kind, KeyKind::kInt);
}

TEST(KeyTableTest, TheFirstInsertFixesTheKind) {
  KeyTable table;
  table.insert("init", make({"w"}));
  EXPECT_THROW(table.find("push", 1), c10::TypeError);
  EXPECT_THROW(table.find_one("in", 1), c10::TypeError);
  table.erase("delete", "w");
  EXPECT_THROW(table.insert("init", make({1})), c10::TypeError);
  EXPECT_EQ(table.summary().kind, KeyKind::kStr);
}

TEST(KeyTableTest, EraseIsAllOrNothing) {
  KeyTable table;
  table.insert("init", make({1, 2, 3}));
  EXPECT_THROW(table.erase("delete", {1, 4}), UnknownKeyError);
  EXPECT_EQ(table.summary().num_keys, 3);
  table.erase("delete", {3, 1, 3});
  EXPECT_EQ(order(table), (std::vector<std::string>{"(key 2)"}));
}

TEST(KeyTableTest, AnErasedEntryLivesWhileACallHoldsIt) {
  KeyTable table;
  table.insert("init", make({1}));
  const Entries held = table.find("push", 1);
  table.erase("delete", 1);
  EXPECT_EQ(held[0]->key, Key(1));
  EXPECT_EQ(held[0].use_count(), 1);
}

TEST(KeyTableTest, ErrorsOfUnknownKeysNameTheKeyAndTheFix) {
  const KeyTable table;
  try {
    table.find("pull", {"conv1.weight"});
    FAIL() << "no error";
  } catch (const UnknownKeyError& error) {
    const std::string message = error.what_without_backtrace();
    EXPECT_NE(message.find("pull: expected"), std::string::npos) << message;
    EXPECT_NE(message.find("init('conv1.weight'"), std::string::npos)
        << message;
    EXPECT_NE(message.find("(key 'conv1.weight')"), std::string::npos)
        << message;
  }
}

TEST(KeyTableTest, EveryMethodThrowsAfterClose) {
  KeyTable table;
  table.insert("init", make({1}));
  table.close();
  table.close();
  EXPECT_THROW(table.insert("init", make({2})), c10::Error);
  EXPECT_THROW(table.find("push", 1), c10::Error);
  EXPECT_THROW(table.erase("delete", 1), c10::Error);
  EXPECT_THROW(table.find_one("in", 1), c10::Error);
  EXPECT_THROW(table.entries("keys"), c10::Error);
  EXPECT_FALSE(table.summary().is_open);
  EXPECT_EQ(table.summary().num_bytes, 0);
}

TEST(KeyTableTest, TakeReplacesTheEntriesAndReturnsTheOld) {
  KeyTable table;
  KeyTable other;
  const Entries old = make({5, 3});
  const Entries entries = make({3, 9, 7});
  table.insert("init", old);
  other.insert("init", entries);
  const Entries held = table.find("push", 3);
  const auto replaced = table.take("load", other);
  ASSERT_EQ(replaced.size(), 2);
  EXPECT_EQ(replaced[0], old[0]);
  EXPECT_EQ(replaced[1], old[1]);
  EXPECT_EQ(held[0], old[1]);
  EXPECT_EQ(table.find("push", 3)[0], entries[0]);
  EXPECT_EQ(table.find_one("in", 5), nullptr);
  EXPECT_EQ(other.summary().num_keys, 0);
  table.insert("init", make({5})); // comes last
  EXPECT_EQ(
      order(table),
      (std::vector<std::string>{"(key 3)", "(key 9)", "(key 7)", "(key 5)"}));
}

TEST(KeyTableTest, TakeRejectsKeysOfTheOtherKind) {
  KeyTable table;
  KeyTable other;
  table.insert("init", make({1}));
  table.erase("delete", 1); // the kind stays
  table.insert("init", make({2}));
  other.insert("init", make({"w"}));
  EXPECT_THROW(table.take("load", other), c10::TypeError);
  EXPECT_EQ(order(table), (std::vector<std::string>{"(key 2)"}));
  EXPECT_EQ(order(other), (std::vector<std::string>{"(key 'w')"}));
  EXPECT_EQ(table.summary().kind, KeyKind::kInt);
}

TEST(KeyTableTest, TakeFixesTheKindOrKeepsIt) {
  KeyTable table;
  KeyTable named;
  KeyTable empty;
  named.insert("init", make({"w"}));
  table.take("load", named);
  EXPECT_EQ(table.summary().kind, KeyKind::kStr);
  table.take("load", empty);
  EXPECT_EQ(table.summary().num_keys, 0);
  EXPECT_EQ(table.summary().kind, KeyKind::kStr);
}

TEST(KeyTableTest, AReservedKeyIsNotNew) {
  using Reservation = KeyTable::Reservation;
  KeyTable table;
  table.insert("init", make({1}));
  {
    const Reservation first(table, "init", {2, 3});
    EXPECT_THROW(Reservation(table, "init", {4, 3}), c10::ValueError);
    EXPECT_THROW(Reservation(table, "init", {1}), c10::ValueError);
    const Reservation other(table, "init", {4}); // the refused one has none
    table.insert("init", make({2, 3}));
  }
  EXPECT_THROW(Reservation(table, "init", {2}), c10::ValueError);
  const Reservation again(table, "init", {4});
}

TEST(KeyTableTest, ReservedKeysAreOfOneKind) {
  using Reservation = KeyTable::Reservation;
  KeyTable table;
  {
    const Reservation first(table, "init", {2});
    EXPECT_THROW(Reservation(table, "init", {"a"}), c10::TypeError);
  }
  const Reservation other(table, "init", {"a"}); // the first has failed
}

TEST(KeyTableTest, AClosedTableTakesNothing) {
  KeyTable table;
  KeyTable other;
  other.insert("init", make({1}));
  table.close();
  EXPECT_THROW(table.take("load", other), c10::Error);
  EXPECT_EQ(other.summary().num_keys, 1);
}

TEST(KeyTableTest, RandomOperationsMatchASet) {
  for (unsigned seed = 0; seed < 20; ++seed) {
    std::mt19937_64 random(seed);
    KeyTable table;
    std::set<int64_t> model;
    for (int step = 0; step < 500; ++step) {
      // Far apart, so that neighbours and the upper 32 bits both count.
      const int64_t key = static_cast<int64_t>(random() % 16) * 4294967295;
      if (random() % 2 == 0) {
        const bool fresh = model.insert(key).second;
        if (fresh) {
          table.insert("init", make({key}));
        } else {
          EXPECT_THROW(table.insert("init", make({key})), c10::ValueError);
        }
      } else if (model.erase(key) != 0) {
        table.erase("delete", key);
      } else if (table.summary().kind) {
        EXPECT_THROW(table.erase("delete", key), UnknownKeyError);
      }
      ASSERT_EQ(table.summary().num_keys, static_cast<int64_t>(model.size()))
          << "seed " << seed;
      for (const int64_t present : model) {
        ASSERT_NE(table.find_one("in", present), nullptr) << "seed " << seed;
      }
    }
  }
}

} // namespace
} // namespace torchkv
