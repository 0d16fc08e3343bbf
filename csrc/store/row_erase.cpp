#include "row_erase.h"

#include <vector>

#include "../core/errors.h"
#include "check.h"
#include "parse_row_ids.h"
#include "store.h"

namespace torchkv {

void erase_rows(
    Store& store,
    const char* op,
    const Keys& keys,
    const Tensors& row_ids) {
  check_count(op, keys, row_ids);
  std::vector<at::Tensor> ids;
  for (int64_t i = 0; i < keys.size(); ++i) {
    const Where where{op, keys.list[i]};
    const auto given = row_ids.of(i);
    TORCHKV_CHECK_VALUE(
        given.size() == 1,
        where,
        "expected one tensor of row ids, but got a list of ",
        given.size());
    const auto meta = store.meta(op, where.key);
    if (!meta) {
      throw_unknown_key(op, where.key);
    }
    TORCHKV_CHECK_VALUE(
        meta->is_row_sparse,
        where,
        "expected a row-sparse key, but got a dense one, which keeps its rows");
    ids.push_back(parse_row_ids(where, *meta, given[0]));
  }
  store.erase_rows(op, keys, ids);
}

} // namespace torchkv
