// Server: messages that no right worker sends change nothing.
#include <gtest/gtest.h>

#include <limits>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "dist/protocol/server.h"
#include "server_script.h"

namespace torchkv::dist {
namespace {

using Edit = ServerScript::Edit;
using Values = ServerScript::Values;

constexpr int64_t kHuge = std::numeric_limits<int64_t>::max();

struct Nonsense {
  const char* what;
  Kind kind;
  Edit edit;
  int32_t rank = 1;
};

SliceId on_server() {
  return {};
}

Counts unsorted() {
  return {{{"k", 0}, 1}, {{"a", 0}, 1}};
}

// Each would be accepted but for `edit`.
std::vector<Nonsense> nonsense() {
  const std::vector<std::pair<const char*, Edit>> common = {
      {"rank", [](Message& m) { m.header.rank = 3; }},
      {"negative rank", [](Message& m) { m.header.rank = -1; }},
      {"job", [](Message& m) { m.header.job = 2; }},
      {"store", [](Message& m) { m.header.store = 2; }},
      {"server", [](Message& m) { m.header.server = 1; }},
      {"inc", [](Message& m) { m.header.inc = 0; }},
      {"floor", [](Message& m) { m.header.floor = -1; }},
      {"huge floor", [](Message& m) { m.header.floor = kHuge; }},
      {"floor beyond", [](Message& m) { m.header.floor = m.opno + 1; }},
      {"committed", [](Message& m) { m.header.committed = kHuge; }},
      {"phase", [](Message& m) { m.header.phase = -2; }},
      {"opno", [](Message& m) { m.opno = 0; }},
      {"huge opno", [](Message& m) { m.opno = kHuge; }},
      {"prev", [](Message& m) { m.prev = m.opno; }},
      {"no prev", [](Message& m) { m.prev = 0; }},
      {"negative prev", [](Message& m) { m.prev = -1; }},
      {"acked", [](Message& m) { m.acked = m.opno + 1; }},
      {"gen", [](Message& m) { m.gen = -1; }},
      {"snap", [](Message& m) { m.snap = kHuge; }},
      {"retire", [](Message& m) { m.retire = -1; }},
      {"factor",
       [](Message& m) { m.factor = std::numeric_limits<double>::infinity(); }},
      {"error",
       [](Message& m) {
         m.error = Error();
         m.error->code = static_cast<ErrorCode>(100);
       }},
      {"kind", [](Message& m) { m.kind = static_cast<Kind>(200); }},
      {"answer", [](Message& m) { m.kind = Kind::kDone; }},
      {"server's slice", [](Message& m) { m.slice = on_server(); }},
      {"index", [](Message& m) { m.slice.index = -7; }},
      {"group", [](Message& m) { m.group = Group(); }},
  };
  std::vector<Nonsense> all;
  for (const auto& [what, edit] : common) {
    all.push_back({what, Kind::kPush, edit});
  }
  const std::vector<std::pair<const char*, Edit>> pushes = {
      {"no pieces",
       [](Message& m) {
         m.pieces = 0;
         m.index = -1;
       }},
      {"negative pieces", [](Message& m) { m.pieces = -1; }},
      {"piece", [](Message& m) { m.index = 2; }},
      {"negative piece", [](Message& m) { m.index = -2; }},
      {"short piece", [](Message& m) { m.payload = m.payload.slice(0, 15); }},
      {"long piece",
       [](Message& m) { m.payload = ServerScript::blob({1, 2, 3}); }},
      {"region", [](Message& m) { m.region = Region{1, 0, 32}; }},
      {"total", [](Message& m) { m.total = -4; }},
      {"item", [](Message& m) { m.item_bytes = -1; }},
      {"huge item", [](Message& m) { m.item_bytes = 1 << 30; }},
      {"round", [](Message& m) { m.round = -1; }},
      {"base", [](Message& m) { m.base = -1; }},
  };
  for (const auto& [what, edit] : pushes) {
    all.push_back({what, Kind::kPush, edit});
    all.push_back({what, Kind::kPushPull, edit});
  }
  all.push_back({"query in a region", Kind::kPull, [](Message& m) {
                   m.pieces = 1;
                   m.index = 0;
                   m.region = Region{1, 0, 8};
                 }});
  all.push_back({"piece behind the query", Kind::kPull, [](Message& m) {
                   m.pieces = 1;
                   m.index = 1;
                 }});
  all.push_back(
      {"version", Kind::kPull, [](Message& m) { m.min_version = -1; }});
  all.push_back({"norm", Kind::kNorm, {}, 0});
  all.push_back({"factor", Kind::kFactor, {}, 0});
  all.push_back({"config", Kind::kConfig, [](Message& m) { m.gen = 1; }});
  all.push_back({"gen 0", Kind::kConfig, {}, 0});
  all.push_back(
      {"retire",
       Kind::kConfig,
       [](Message& m) {
         m.gen = 1;
         m.retire = 2;
       },
       0});
  all.push_back({"snapshot", Kind::kSnapshot, [](Message& m) { m.snap = 1; }});
  all.push_back({"snap 0", Kind::kSnapshot, {}, 0});
  all.push_back(
      {"snap", Kind::kSnapshot, [](Message& m) { m.snap = 1'000'000; }, 0});
  all.push_back(
      {"order", Kind::kEnter, [](Message& m) { m.counts = unsorted(); }});
  all.push_back({"twice", Kind::kEnter, [](Message& m) {
                   m.counts = {{{"k", 0}, 1}, {{"k", 0}, 1}};
                 }});
  all.push_back(
      {"count", Kind::kEnter, [](Message& m) { m.counts = {{{"k", 0}, -1}}; }});
  all.push_back(
      {"of a key", Kind::kMeet, [](Message& m) { m.slice = {"k", 0}; }});
  all.push_back(
      {"of a key", Kind::kMeet, [](Message& m) { m.slice = {"k", -1}; }});
  return all;
}

Message make(ServerScript& s, const Nonsense& wrong) {
  const bool on_key = wrong.kind == Kind::kPush ||
      wrong.kind == Kind::kPushPull || wrong.kind == Kind::kPull ||
      wrong.kind == Kind::kNorm || wrong.kind == Kind::kFactor;
  Message message = s.operation(
      wrong.rank, wrong.kind, on_key ? ServerScript::slice() : SliceId());
  if (wrong.kind == Kind::kPush || wrong.kind == Kind::kPushPull) {
    message.round = 1;
    message.pieces = 2;
    message.index = 0;
    message.payload = ServerScript::blob({1, 1});
  }
  if (wrong.edit) {
    wrong.edit(message);
  }
  return message;
}

TEST(ServerRefusalTest, NonsenseIsDroppedBeforeItChangesAnything) {
  for (const auto& wrong : nonsense()) {
    SCOPED_TRACE(std::string(name(wrong.kind)) + ": " + wrong.what);
    ServerScript s(ServerScript::config(1));
    s.wait(0.5);
    s.out.clear();
    s.send(make(s, wrong));
    EXPECT_TRUE(s.out.empty());
    EXPECT_EQ(s.server.slices().size(), 1);
    // The right one still comes through.
    Message right = s.request(1, Kind::kPull);
    right.slice = ServerScript::slice();
    right.opno = 2;
    right.prev = 1;
    s.send(right);
    EXPECT_EQ(s.value(1, 2), (Values{0, 0, 0, 0}));
  }
}

TEST(ServerRefusalTest, TheSameMessagesWithoutTheEditAreAccepted) {
  for (auto wrong : nonsense()) {
    const bool is_wrong_by_itself = wrong.kind == Kind::kNorm ||
        wrong.kind == Kind::kFactor || wrong.kind == Kind::kConfig ||
        wrong.kind == Kind::kSnapshot;
    if (is_wrong_by_itself) {
      continue;
    }
    SCOPED_TRACE(std::string(name(wrong.kind)) + ": " + wrong.what);
    ServerScript s(ServerScript::config(1));
    s.out.clear();
    wrong.edit = nullptr;
    const Message message = make(s, wrong);
    s.send(message);
    if (message.kind == Kind::kMeet) {
      s.send(message);
    }
    EXPECT_FALSE(s.out.empty());
  }
}

TEST(ServerRefusalTest, InitsThatDoNotAddUp) {
  const std::vector<std::pair<const char*, Edit>> edits = {
      {"from rank 1", [](Message& m) { m.header.rank = 1; }},
      {"pieces", [](Message& m) { m.pieces = 1; }},
      {"more pieces", [](Message& m) { m.pieces = 1 << 30; }},
      {"piece", [](Message& m) { m.index = 2; }},
      {"size", [](Message& m) { m.payload = m.payload.slice(0, 8); }},
      {"total", [](Message& m) { m.spec.total = -1; }},
      {"huge total", [](Message& m) { m.spec.total = kHuge; }},
      {"other total", [](Message& m) { m.spec.total = 5; }},
      {"item", [](Message& m) { m.spec.item_bytes = 0; }},
      {"huge item", [](Message& m) { m.spec.item_bytes = 1 << 30; }},
      {"sizes", [](Message& m) { m.spec.sizes = {-4}; }},
      {"index", [](Message& m) { m.slice.index = 1; }},
      {"server", [](Message& m) { m.slice = SliceId(); }},
      {"region", [](Message& m) { m.region = Region{1, 0, 32}; }},
  };
  for (const auto& [what, edit] : edits) {
    SCOPED_TRACE(what);
    ServerScript s(ServerScript::config(1), nullptr, false);
    for (const int32_t rank : {0, 1, 2}) {
      s.hello(rank);
    }
    s.out.clear();
    const Message init = s.operation(0, Kind::kInit, ServerScript::slice());
    const auto parts = ServerScript::parts(init, {1, 2, 3, 4});
    Message wrong = parts[0];
    edit(wrong);
    s.send(wrong);
    EXPECT_TRUE(s.out.empty());
    s.send(parts[0]);
    s.send(parts[1]);
    ASSERT_TRUE(s.view());
    EXPECT_EQ(s.stored(), (Values{1, 2, 3, 4}));
  }
}

Edit row_sparse(const Edit& edit = {}) {
  return [edit](Message& m) {
    m.spec.total = m.total = 0;
    m.spec.sizes = {std::numeric_limits<int64_t>::max() / 2, 2};
    m.spec.row_init = RowInit();
    if (edit) {
      edit(m);
    }
  };
}

TEST(ServerRefusalTest, RowSparseKeysBeginWithAnyRows) {
  const std::vector<std::pair<const char*, Edit>> edits = {
      {"piece", [](Message& m) { m.index = 3; }},
      {"short piece", [](Message& m) { m.payload = m.payload.slice(0, 8); }},
      {"total", [](Message& m) { m.spec.total = 4; }},
      {"no sizes", [](Message& m) { m.spec.sizes = {}; }},
      {"sizes", [](Message& m) { m.spec.sizes[0] = -1; }},
      {"row", [](Message& m) { m.spec.sizes[1] = -2; }},
      {"huge row",
       [](Message& m) {
         m.spec.sizes = {1, int64_t{1} << 40, int64_t{1} << 40};
       }},
      {"dense", [](Message& m) { m.spec.row_init.reset(); }},
  };
  ServerScript s(ServerScript::config(1), nullptr, false);
  s.hello(0);
  s.out.clear();
  const Message init =
      s.operation(0, Kind::kInit, ServerScript::slice(), row_sparse());
  const auto parts = ServerScript::parts(init, {1, 2, 3, 4, 5});
  for (const auto& [what, edit] : edits) {
    SCOPED_TRACE(what);
    Message wrong = parts[0];
    edit(wrong);
    s.send(wrong);
    EXPECT_TRUE(s.out.empty());
    EXPECT_FALSE(s.view());
  }
  for (const auto& part : parts) {
    s.send(part);
  }
  ASSERT_TRUE(s.view());
  EXPECT_EQ(s.stored(), (Values{1, 2, 3, 4, 5}));
}

TEST(ServerRefusalTest, RowSparseKeysAreNotPushedAsElements) {
  for (const bool is_encoded : {false, true}) {
    ServerScript s(ServerScript::config(1), nullptr, false);
    s.hello(0);
    s.send_parts(
        s.operation(0, Kind::kInit, ServerScript::slice(), row_sparse()), {1});
    Message push = s.operation(
        0, Kind::kPush, ServerScript::slice(), row_sparse([&](Message& m) {
          m.round = 1;
          m.pieces = 1;
          m.index = 0;
          m.is_encoded = is_encoded;
          m.payload = is_encoded ? ServerScript::blob({1, 2}) : Blob();
        }));
    s.send(push);
    EXPECT_EQ(s.messages(0, Kind::kError).size(), is_encoded ? 0 : 1);
    EXPECT_EQ(s.view()->busy, is_encoded);
  }
}

TEST(ServerRefusalTest, TwoPhasesAndEnterAreForTheirModes) {
  ServerScript s(ServerScript::config(kSync));
  s.out.clear();
  s.control(1, Kind::kEnter);
  s.send(make(s, {"", Kind::kNorm, {}, 1}));
  s.send(make(s, {"", Kind::kFactor, {}, 1}));
  EXPECT_TRUE(s.out.empty());
}

TEST(ServerRefusalTest, ADeclaredNumberOfPiecesTakesNoMemory) {
  ServerScript s(ServerScript::config(1));
  Message push = s.operation(1, Kind::kPush, ServerScript::slice());
  push.round = 1;
  push.pieces = std::numeric_limits<int32_t>::max();
  push.index = push.pieces - 2;
  push.payload = ServerScript::blob({1, 1});
  s.send(push); // would be 2 billion blobs
  push.pieces = 2; // another story: dropped
  push.index = 0;
  s.send(push);
  push.index = 1;
  s.send(push);
  EXPECT_TRUE(s.begun().empty());
}

TEST(ServerRefusalTest, NullAndStrangeRoundsAreIgnored) {
  ServerScript s(ServerScript::config(1));
  s.push(1, 1);
  s.server.on_applied(nullptr, std::nullopt, s.now);
  s.server.on_measured(nullptr, s.now);
  auto copy = std::make_shared<Round>(*s.begun()[0]);
  s.server.on_applied(copy, std::nullopt, s.now);
  copy->slice = {"other", 0};
  s.server.on_applied(copy, std::nullopt, s.now);
  s.server.on_written(5, std::nullopt, s.now);
  s.server.on_peer_lost(-1, s.now);
  s.server.on_peer_lost(3, s.now);
  EXPECT_EQ(s.view()->version, 0);
  s.apply_all();
  s.apply(s.begun()[0]); // once only
  EXPECT_EQ(s.view()->version, 1);
}

int64_t any_number(std::mt19937_64& random) {
  switch (random() % 4) {
    case 0:
      return static_cast<int64_t>(random());
    case 1:
      return -1;
    default:
      return static_cast<int64_t>(random() % 12);
  }
}

Message any_message(std::mt19937_64& random, ServerScript& s, int32_t rank) {
  Message m = s.request(rank, static_cast<Kind>(random() % kNumKinds));
  const std::vector<SliceId> slices = {
      {}, {"k", 0}, {"k", 0}, {"k", 1}, {"mine", 0}};
  m.slice = slices[random() % slices.size()];
  m.opno = static_cast<int64_t>(random() % 30);
  m.prev = m.opno - static_cast<int64_t>(random() % 3);
  m.header.floor = static_cast<int64_t>(random() % 4 == 0 ? random() % 30 : 0);
  m.acked = static_cast<int64_t>(random() % 4 == 0 ? random() % 30 : 0);
  m.header.inc = random() % 20 == 0 ? any_number(random) : 1;
  m.header.phase = random() % 50 == 0 ? any_number(random) : 0;
  m.spec = ServerScript::spec(random() % 4 == 0 ? any_number(random) : 4);
  m.total = random() % 4 == 0 ? any_number(random) : 4;
  if (is_operation(m.kind) && m.kind <= Kind::kPushPull) {
    m.pieces = static_cast<int32_t>(1 + (random() % 2));
    m.index = static_cast<int32_t>(random() % 3) - 1;
    m.payload = ServerScript::blob({1, 1});
  }
  m.round = any_number(random);
  m.base = any_number(random);
  m.min_version = any_number(random);
  m.gen = random() % 4 == 0 ? any_number(random) : 0;
  m.snap = random() % 4 == 0 ? any_number(random) : 0;
  m.retire = any_number(random);
  m.counts = {{{"k", 0}, static_cast<int64_t>(random() % 5)}};
  m.have = {static_cast<int32_t>(any_number(random))};
  m.got = {{any_number(random), static_cast<int32_t>(any_number(random))}};
  m.opnos = {any_number(random)};
  return m;
}

// A worker that sends anything; the others' keys and barriers stay right. Rank
// 0 may create and configure, so it is not the one.
TEST(ServerRefusalTest, ABuggyWorkerHarmsItselfOnly) {
  for (unsigned seed = 0; seed < 60; ++seed) {
    SCOPED_TRACE(seed);
    std::mt19937_64 random(seed);
    Config config = ServerScript::config(1);
    config.leases = seed % 2 == 0;
    ServerScript s(config);
    int64_t applied = 0;
    for (int64_t round = 1; round <= 20; ++round) {
      Frame frame;
      for (int i = 0; i < 25; ++i) {
        frame.push_back(any_message(random, s, 2));
        frame.back().group = std::nullopt;
      }
      s.server.on_message(frame, s.now);
      s.collect();
      if (config.leases) { // what it leases it frees, or nobody could go on
        Message free = s.request(2, Kind::kFree);
        for (int64_t opno = 0; opno < 30; ++opno) {
          free.opnos.push_back(opno);
        }
        s.send(free);
      }
      s.apply_all();
      const int64_t before = s.view()->version;
      s.push(1, round);
      s.apply_all();
      ++applied;
      EXPECT_EQ(s.view()->version, before + 1);
    }
    const auto done = s.messages(1, Kind::kDone);
    EXPECT_EQ(done.size(), static_cast<size_t>(applied + 1));
    EXPECT_TRUE(s.messages(1, Kind::kFatal).empty());
  }
}

// The same with every mode and every rank: nothing but an orderly end.
TEST(ServerRefusalTest, NothingCrashesTheServer) {
  size_t num_actions = 0;
  for (unsigned seed = 0; seed < 150; ++seed) {
    std::mt19937_64 random(seed);
    Config config = ServerScript::config(
        seed % 3 == 0 ? kSync : std::optional<int32_t>(seed % 3));
    config.leases = seed % 2 == 0;
    config.push_regions = seed % 5 == 0;
    config.policy.grace = seed % 7 == 0 ? 0.1 : 0;
    if (seed % 4 == 0) {
      config.policy.staleness = 1;
    }
    ServerScript s(config);
    for (int i = 0; i < 300; ++i) {
      const auto rank = static_cast<int32_t>(random() % 3);
      Message message = any_message(random, s, rank);
      if (random() % 3 == 0) {
        message.header.inc = 2;
      }
      s.send(message);
      switch (random() % 20) {
        case 0:
          s.lose(rank);
          break;
        case 1:
          s.wait(0.3);
          break;
        case 2:
          s.server.on_written(
              static_cast<int64_t>(random() % 12), std::nullopt, s.now);
          break;
        case 3:
          s.hello(rank, 1 + static_cast<int64_t>(random() % 2));
          break;
        case 4:
          for (const auto* measure : s.all<Measure>()) {
            s.server.on_measured(measure->round, s.now);
          }
          break;
        case 5:
          s.apply_all();
          break;
        default:
          break;
      }
    }
    num_actions += s.out.size();
  }
  EXPECT_GT(num_actions, 5000);
}

} // namespace
} // namespace torchkv::dist
