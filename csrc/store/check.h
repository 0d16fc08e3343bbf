#pragma once

#include <ATen/core/Tensor.h>
#include <c10/util/ArrayRef.h>

#include <string>

#include "../memory/meta.h"
#include "arguments.h"
#include "entries.h"
#include "key_table.h"

namespace torchkv {

// The checks of a call's tensors, made before anything is written. All throw
// c10::ValueError, TypeError or NotImplementedError with a message that names
// the operation `op`, what was expected, what was given, and the key.

// Whether the store can hold a tensor like this: dense, with its own memory, on
// a device that PyTorch can run on.
void check_storable(const char* op, const Key& key, const at::Tensor& tensor);

void check_shape(const char* op, const Entry& entry, c10::IntArrayRef sizes);

// "torch.float32"
std::string dtype_name(c10::ScalarType dtype);

// The values of a call, if it has any: one or more tensors per key, each as
// check_storable, of the stored shape and of a dtype that converts to the
// stored one; or encoded, in a form with a backend.
void check_values(const Call& call, const Entries& entries);

// The outs, if it has any: one or more tensors per key, each as check_storable,
// of the stored shape, of a dtype that the stored one converts to, and without
// overlapping elements.
void check_outs(const Call& call, const Entries& entries);

void check_not_empty(const char* op, const Keys& keys);

// As many groups as keys, none of them empty. Bindings ensure this; C++
// programs may not.
void check_count(const char* op, const Keys& keys, const Tensors& tensors);

// One value for each key, of which the store can hold a copy: dense, and as
// check_storable.
void check_one_each(const Call& call);

void check_no_repeats(const char* op, const Entries& entries);

// Throws UnknownKeyError if one of the keys, which have options, is not in the
// table.
void check_known(
    const char* op,
    const KeyTable& table,
    c10::ArrayRef<Key> keys);

} // namespace torchkv
