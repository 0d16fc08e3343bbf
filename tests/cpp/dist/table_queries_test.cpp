// What servers answer of row-sparse keys, before and after their first update.
#include "dist/table_queries.h"

#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <cstring>
#include <future>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "core/row_sparse.h"
#include "dist/row_payload.h"
#include "recording_runtime.h"

namespace torchkv::dist {
namespace {

using TableIds = std::vector<int64_t>;

const SliceId kTableSlice{"w", 0};

KeySpec table_spec(std::vector<int64_t> sizes) {
  KeySpec spec;
  spec.sizes = std::move(sizes);
  spec.dtype = static_cast<int32_t>(c10::kFloat);
  spec.row_init = RowInit();
  spec.row_init->id = RowInit::Id::kUniform;
  return spec;
}

// Rows of the numbers of their ids.
Blob table_rows(const KeySpec& spec, const TableIds& ids) {
  RowSparse value;
  value.ids = at::tensor(ids, c10::kLong);
  const at::Tensor rows =
      value.ids.to(c10::kFloat).unsqueeze(1).expand({-1, row_size(spec)});
  return pack_rows(
      value, rows.contiguous(), spec, std::vector<Place>(1), Buffers())[0];
}

struct TableScene {
  explicit TableScene(const TableIds& ids) {
    value = std::make_shared<Value>();
    value->pieces = cut(table_rows(spec, ids), config.piece_bytes);
    value->kid = 1;
  }

  at::Tensor ask(const Blob& query, c10::ScalarType dtype) {
    const ValuePtr answer = queries.answer(kTableSlice, spec, *value, {query});
    if (answer == nullptr) {
      return {};
    }
    int64_t bytes = 0;
    for (const Blob& piece : answer->pieces) {
      bytes += static_cast<int64_t>(piece.size());
    }
    return tensor_of(
        answer->pieces,
        bytes / static_cast<int64_t>(c10::elementSize(dtype)),
        dtype,
        Buffers());
  }
  int64_t count() {
    return ask(pack_count_query(Buffers()), c10::kLong).item<int64_t>();
  }
  TableIds ids(int64_t begin, int64_t count) {
    const at::Tensor found =
        ask(pack_ids_query(begin, count, Buffers()), c10::kLong);
    const auto* const all = found.const_data_ptr<int64_t>();
    return {all, all + found.numel()};
  }
  at::Tensor rows(const TableIds& wanted) {
    const Blob query = pack_ids(
        RowForm::kRows,
        at::tensor(wanted, c10::kLong),
        spec,
        std::vector<Place>(1),
        Buffers())[0];
    return ask(query, c10::kFloat);
  }
  // Without an updater: these rows become the value.
  void push(const TableIds& ids) {
    auto round = std::make_shared<Round>();
    round->slice = kTableSlice;
    round->spec = std::make_shared<const KeySpec>(spec);
    round->kid = 1;
    round->source = value;
    Push& push = round->pushes.emplace_back();
    push.is_encoded = true;
    push.dtype = spec.dtype;
    push.pieces = {table_rows(spec, ids)};
    applied = {};
    auto done = applied.get_future();
    applier.apply(round);
    EXPECT_EQ(done.get(), std::nullopt);
    value = round->result;
    value->kid = 1;
  }

  static Config small_pieces() {
    Config result;
    result.piece_bytes = 20; // within ids and rows
    return result;
  }

  KeySpec spec = table_spec({100, 3});
  Config config = small_pieces();
  ValuePtr value;
  std::promise<std::optional<std::string>> applied;
  testing::RecordingRuntime runtime;
  Applier applier{
      runtime,
      nullptr,
      0,
      Config(),
      Buffers(),
      [this](const auto& finished) { applied.set_value(finished[0].error); }};
  TableQueries queries{applier, config, Buffers()};
};

TEST(TableQueriesTest, OfWhatInitHasBrought) {
  TableScene scene({9, 3, 5});
  EXPECT_EQ(scene.count(), 3);
  EXPECT_EQ(scene.ids(0, 3), (TableIds{9, 3, 5}));
  EXPECT_EQ(scene.ids(1, 1), TableIds{3});
  EXPECT_EQ(scene.ids(2, 3), (TableIds{5, -1, -1}));
  EXPECT_EQ(scene.ids(7, 2), (TableIds{-1, -1}));
  const at::Tensor rows = scene.rows({3, 7, 9}).view({3, 3});
  EXPECT_TRUE(rows[0].eq(3).all().item<bool>());
  EXPECT_TRUE(rows[2].eq(9).all().item<bool>());
  EXPECT_TRUE(rows[1].ge(0).logical_and(rows[1].lt(1)).all().item<bool>());
}

TEST(TableQueriesTest, OfWhatThePushesHaveLeft) {
  TableScene scene({9, 3, 5});
  scene.push({3, 8});
  EXPECT_EQ(scene.count(), 2);
  EXPECT_EQ(scene.ids(0, 3).back(), -1);
  const at::Tensor rows = scene.rows({3, 8, 9}).view({3, 3});
  EXPECT_TRUE(rows[0].eq(3).all().item<bool>());
  EXPECT_TRUE(rows[1].eq(8).all().item<bool>());
  EXPECT_TRUE(rows[2].lt(1).all().item<bool>()); // forgotten
}

TEST(TableQueriesTest, OtherQueriesAreRefused) {
  TableScene scene({9, 3, 5});
  for (int pushes = 0; pushes < 2; ++pushes) {
    EXPECT_FALSE(scene.rows({3, 100}).defined());
    EXPECT_FALSE(scene.rows({3, 3}).defined());
    EXPECT_FALSE(scene.ask(Blob(), c10::kLong).defined());
    EXPECT_FALSE(
        scene.ask(pack_ids_query(-1, 2, Buffers()), c10::kLong).defined());
    EXPECT_FALSE(
        scene.ask(pack_ids_query(0, -1, Buffers()), c10::kLong).defined());
    const int64_t many = TableQueries::kMostIds + 1;
    EXPECT_FALSE(
        scene.ask(pack_ids_query(0, many, Buffers()), c10::kLong).defined());
    scene.push({3, 8});
  }
}

TEST(TableQueriesTest, AnswersOfSeveralRowsAreBounded) {
  TableScene scene({});
  scene.spec = table_spec({100, int64_t{12} << 20U}); // 48 MiB
  scene.value->pieces =
      cut(table_rows(scene.spec, {}), scene.config.piece_bytes);
  EXPECT_EQ(scene.rows({1}).numel(), scene.spec.sizes[1]);
  EXPECT_FALSE(scene.rows({1, 2}).defined());
}

TEST(TableQueriesTest, ValuesThatAreNotRows) {
  TableScene scene({9, 3, 5});
  const Blob good = table_rows(scene.spec, {9, 3, 5});
  const auto with_count = [&](int64_t count) {
    auto bytes = std::make_shared<std::string>(
        reinterpret_cast<const char*>(good.data()), good.size());
    std::memcpy(bytes->data() + 8, &count, sizeof(count));
    return Blob(bytes, bytes->data(), bytes->size());
  };
  for (const Blob& wrong :
       {Blob(),
        good.slice(0, 15),
        good.slice(0, good.size() - 4),
        with_count(-1),
        with_count(4),
        with_count(int64_t{1} << 60U)}) {
    scene.value->pieces = cut(wrong, scene.config.piece_bytes);
    EXPECT_THROW(scene.count(), c10::ValueError);
    EXPECT_THROW(scene.ids(0, 3), c10::ValueError);
    EXPECT_THROW(scene.rows({3}), c10::ValueError);
  }
  scene.value->pieces = cut(good, scene.config.piece_bytes);
  scene.spec.item_bytes = 1;
  EXPECT_THROW(scene.rows({3}), c10::ValueError);
  scene.spec.item_bytes = 4;
  scene.spec.dtype = static_cast<int32_t>(c10::kInt); // of uniform numbers
  EXPECT_THROW(scene.rows({3}), c10::ValueError);
}

} // namespace
} // namespace torchkv::dist
