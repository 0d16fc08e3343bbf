#pragma once

#include <ATen/core/Tensor.h>

#include "../comm/send.h"
#include "../core/compressed.h"
#include "../memory/entry.h"
#include "../memory/slices.h"
#include "arguments.h"
#include "compression.h"

namespace torchkv {

// For a call whose values are compressed: TypeError for a key of another than a
// floating-point dtype, NotImplementedError for values on an accelerator whose
// current stream is captured into a CUDA graph: each replay would have the same
// residual and random numbers. REQUIRES: the thread holds no entry's mutex.
void check_compressible(
    const Call& call,
    const Entries& entries,
    const Compression& compression,
    Runtime& runtime);

// Whether a key's stored value and these values are in CPU memory, where the
// kernels that sum values compute what is sent. REQUIRES: the entry's mutex.
bool are_in_cpu_memory(const Entry& entry, c10::ArrayRef<Value> values);

// The dtype in which codecs compute for a key, and of its residuals.
c10::ScalarType residual_dtype(const Meta& meta);

// Of a key that a call compresses: drops residuals of a compression that ended
// before this one began. REQUIRES: the entry's mutex.
void renew_residuals(Entry& entry, const StoreCompression& compression);

// Frees residuals of compressions before the generation `later` that the next
// one (null: none) does not send. Of keys that a call holds, that is done at
// their next compressed push. REQUIRES: the thread holds no entry's mutex.
void free_residuals(
    c10::ArrayRef<EntryPtr> entries,
    const StoreCompression* next,
    uint64_t later);

// The random numbers of a value at a position in its list: the same on every
// run. REQUIRES: the entry's mutex.
uint64_t stream_of(const Codec& codec, const Entry& entry, size_t position);

// What the codec sends of a value and its residual, undefined for one without
// error feedback, both in CPU memory and with the memory layout of the stored
// value. `is_divided`: parts of the value are sent by themselves.
Compressed compress(
    const Codec& codec,
    const Meta& meta,
    const at::Tensor& value,
    at::Tensor residual,
    uint64_t stream,
    bool is_divided);

// What the codec sends of a key's value at a position in its list; makes the
// residual where there is none yet, of zeros. REQUIRES: the entry's mutex,
// check_compressible; the value has the memory layout of the stored one; called
// for the positions before it.
Compressed compress(
    const Codec& codec,
    Entry& entry,
    size_t position,
    const at::Tensor& value,
    Slices& slices);

// The same for all other values, of which these, from a position on, are on one
// device: the sum of what is sent, and the residuals, which are not set, all
// laid out as the values.
SentSum compress_to_dense(
    const Codec& codec,
    Entry& entry,
    size_t position,
    c10::ArrayRef<Value> values,
    Slices& slices);

// The codes of each of these values instead.
SentCodes compress_to_codes(
    const Codec& codec,
    Entry& entry,
    size_t position,
    c10::ArrayRef<Value> values,
    Slices& slices);

// Whether a value on a device leaves it as codes: it is added up, at least in
// part, on another one.
bool leaves_as_codes(const Codec& codec, const Entry& entry, c10::Device from);

// A copy of a residual in CPU memory. REQUIRES: the entry's mutex.
at::Tensor residual_on_cpu(
    const Entry& entry,
    Residual& residual,
    Slices& slices);

// ValueError unless these can be an entry's residuals.
void check_residuals(
    const char* op,
    const Entry& entry,
    at::TensorList residuals);

} // namespace torchkv
