#pragma once

#include <cstdint>
#include <memory>
#include <unordered_map>
#include <vector>

#include "../core/export.h"
#include "../memory/row_table.h"
#include "applier.h"
#include "buffers.h"
#include "protocol/slice.h"
#include "row_query.h"

namespace torchkv::dist {

// What the server of a slice of a row-sparse key answers to a query:
//
// - RowForm::kRows: the rows of these ids, with what rows begin with in place
// of
//   those that it does not have;
// - RowForm::kCount: how many rows it has (int64);
// - RowForm::kIds: the ids of some of its rows (int64), as many as asked for,
// in
//   the order in which they are stored; -1 after the last.
//
// Used by one thread at a time. The applier outlives this.
class TORCHKV_API TableQueries {
 public:
  // That a query may ask for.
  static constexpr int64_t kMostIds = 8'000'000;

  TableQueries(Applier& applier, const Config& config, Buffers buffers);
  C10_DISABLE_COPY_AND_ASSIGN(TableQueries);

  // Of a slice that is deleted.
  void forget(const SliceId& slice) {
    indices_.erase(slice);
  }
  // Null if it is none of these, or asks for too much.
  ValuePtr answer(
      const SliceId& slice,
      const KeySpec& spec,
      const Value& value,
      const Blobs& query);

 private:
  // Of a value that is not live: where its rows are.
  struct Index {
    int64_t kid = 0;
    RowTable rows{RowInit()};
  };
  void copy_bytes(const Value& value, int64_t begin, int64_t size, void* out)
      const;
  int64_t num_rows_in(const KeySpec& spec, const Value& value) const;
  std::vector<int64_t> ids_in_payload(
      const Value& value,
      int64_t begin,
      int64_t count) const;
  const RowTable& index_of(
      const SliceId& slice,
      const KeySpec& spec,
      const Value& value);
  at::Tensor ids_in_range(
      const SliceId& slice,
      const KeySpec& spec,
      const Value& value,
      int64_t begin,
      int64_t count);
  at::Tensor rows_with(
      const SliceId& slice,
      const KeySpec& spec,
      const Value& value,
      const at::Tensor& ids);
  at::Tensor rows_of(
      const SliceId& slice,
      const KeySpec& spec,
      const Value& value,
      const at::Tensor& ids);

  Applier& applier_;
  const Config config_;
  const Buffers buffers_;
  // Of slices without an update. One that has had its first is erased when it
  // is asked for again.
  std::unordered_map<SliceId, std::unique_ptr<Index>, SliceHash> indices_;
};

} // namespace torchkv::dist
