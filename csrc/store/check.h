#pragma once

#include <c10/util/ArrayRef.h>

#include <optional>
#include <string>

#include "../core/errors.h"
#include "../core/rule.h"
#include "../memory/key_state.h"
#include "../update/optimizer.h"
#include "../update/updater.h"
#include "arguments.h"
#include "key_table.h"

namespace torchkv {

// The checks of a call's tensors, made before anything is written. All throw
// c10::ValueError, TypeError or NotImplementedError with a message that names
// the operation `op`, what was expected, what was given, and the key.

// Where a tensor is "storable", the store can hold one like it: dense, with its
// own memory, on a device that PyTorch can run on.

// The values of a call, if it has any: one or more storable tensors per key, of
// the stored shape and of a dtype that converts to the stored one; or encoded,
// in a form with a backend.
// Returns whether all are usual: in CPU memory, plain, contiguous, and of the
// stored dtype and shape; or there are none.
bool check_values(const Call& call, const Entries& entries);

// The outs, if it has any: one or more storable tensors per key, of the stored
// shape, of a dtype that the stored one converts to, and without overlapping
// elements.
// Returns the same as check_values().
bool check_outs(const Call& call, const Entries& entries);

// What a row-sparse key is checked against. ValueError for negative sizes, and
// for more elements than 64 bits can count.
Meta row_sparse_meta(
    const Where& where,
    std::optional<int64_t> num_rows,
    c10::IntArrayRef row_shape,
    c10::ScalarType dtype);
// ValueError unless rows of its dtype can begin with this value;
// NotImplementedError if they cannot be summed.
void check_row_init(const Where& where, const Meta& meta, const RowInit& init);

// "torch.float32"
std::string dtype_name(c10::ScalarType dtype);

// Of a value or an out.
void check_shape(const Where& where, const Meta& meta, c10::IntArrayRef sizes);
// Of a sparse one: the same, but for any number of rows if that of the value is
// unlimited.
void check_rows_shape(
    const Where& where,
    const Meta& meta,
    c10::IntArrayRef sizes);

// Of a sparse out, whose rows have any of these ids, in ascending order.
void check_rows_fit(
    const Where& where,
    const at::Tensor& ids,
    const at::Tensor& out);

void check_storable(const Where& where, const at::Tensor& tensor);

// NotImplementedError for a dtype that cannot be summed.
void check_dtype(const Where& where, c10::ScalarType dtype);

// NotImplementedError while the current stream of an accelerator is captured
// into a graph, for values that cannot be: `what` they are.
void check_not_capturing(
    const Where& where,
    Runtime& runtime,
    c10::Device device,
    const char* what);
// The same of the stored value. REQUIRES: the entry's mutex.
void check_not_capturing(
    const Where& where,
    Runtime& runtime,
    const Entry& entry,
    const char* what);

void check_not_empty(const char* op, const Keys& keys);

// As many groups as keys, none of them empty. Bindings ensure this; C++
// programs may not.
void check_count(const char* op, const Keys& keys, const Tensors& tensors);

// One dense, storable value for each key; with `takes_rows`, also a sparse
// tensor; with `takes_encoded`, also rows of one (RowSparse).
void check_one_each(
    const Call& call,
    bool takes_rows = false,
    bool takes_encoded = false);

void check_no_repeats(const char* op, const Entries& entries);

// Throws UnknownKeyError if one of the keys, which have options, is not in the
// table.
void check_known(
    const char* op,
    const KeyTable& table,
    c10::ArrayRef<Key> keys);

// Of keys that a setter names: all of them, which the next push has to find, or
// none in a table with keys, of which they are checked at once, as by
// check_known.
std::vector<Key> check_or_expect(
    const char* op,
    const KeyTable& table,
    std::vector<Key> keys);

// The keys with options of their own that the next push has to find, without
// those that `known`, which may be null, had; those of a table with keys are
// checked at once, as by check_known.
std::vector<Key> unknown_option_keys(
    const char* op,
    const KeyTable& table,
    const Optimizer& optimizer,
    const Optimizer* known);

// TypeError unless the dtype of the key's value is floating-point or complex,
// as optimizers require.
void check_optimizable(const char* op, const Entry& entry);

// NotImplementedError for a row-sparse key with an updater that needs whole
// values.
void check_steps_rows(
    const char* op,
    const Entry& entry,
    const Updater& updater);

// ValueError unless `count`, named `name`, is a count of updates that can grow.
void check_counter(const Where& where, const char* name, int64_t count);

// ValueError unless `state` is a valid state of the rule for the entry: of a
// row-sparse value, of the rows that it has or, where servers have them, of so
// many. REQUIRES: its mutex is free.
void check_state(
    const char* op,
    Entry& entry,
    const RuleSpec& rule,
    const KeyState& state,
    std::optional<int64_t> num_rows = std::nullopt);

} // namespace torchkv
