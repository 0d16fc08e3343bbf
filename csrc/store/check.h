#pragma once

#include <ATen/core/Tensor.h>

#include "../memory/entry.h"
#include "../update/optimizer.h"
#include "arguments.h"

namespace torchkv {

// The checks of a call's tensors, made before anything is written. All throw
// c10::ValueError, TypeError or NotImplementedError with a message that names
// the operation `op`, what was expected, what came, and the key.

// Whether the store can hold a tensor like this: dense, with memory of its own,
// on a device that PyTorch can run on.
void check_storable(const char* op, const Key& key, const at::Tensor& tensor);

// Bytes from the beginning of a storage to the end of the tensor's last element
// there. A storage can be shrunk behind the back of the tensors that use it.
size_t needed_storage_bytes(const at::Tensor& tensor);

// As check_storable, and of the stored shape, and of a dtype that converts to
// the stored one.
void check_value(
    const char* op,
    const Key& key,
    const Meta& meta,
    const at::Tensor& value);

// As check_storable, and of the stored shape, of a dtype that the stored one
// converts to, and with no two elements in one place in memory.
void check_out(
    const char* op,
    const Key& key,
    const Meta& meta,
    const at::Tensor& out);

// As many groups as keys. The doors make sure of it; C++ programs may not.
void check_count(const char* op, const Keys& keys, const Tensors& tensors);

// Whether an optimizer can work on the key's value: TypeError where its dtype
// is neither floating-point nor complex.
void check_optimizable(const char* op, const Key& key, const Meta& meta);

// Whether a count of updates, as `name`, leaves room to count on: ValueError
// where not.
void check_counter(
    const char* op,
    const Key& key,
    const char* name,
    int64_t count);

// Whether `state` is one that the rule has of the key: ValueError where not.
void check_state(
    const char* op,
    const Key& key,
    const Meta& meta,
    const RuleSpec& rule,
    const KeyState& state);

} // namespace torchkv
