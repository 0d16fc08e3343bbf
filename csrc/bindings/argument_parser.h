#pragma once

#include <optional>
#include <string>
#include <string_view>
#include <utility>

#include "../core/errors.h"
#include "../store/arguments.h"

namespace torchkv {

// The forms in which keys and values may be given, once for all bindings.
// `Objects` describes the objects of a binding:
//
//   using Object = ...;                       // cheap to copy
//   std::optional<Key> as_key(op, object);    // none: not an int or a str
//   const at::Tensor* as_tensor(object);      // null: not a tensor
//   bool is_list(object);                     // a list or a tuple
//   int64_t size(object);                     // REQUIRES: is_list
//   Object item(object, i);                   // REQUIRES: is_list
//   std::string type_name(object);
//
//   key         value
//   k           a tensor, or a list of tensors, one per replica
//   [k, ...]    a list with one of these per key, tensors and lists mixed
template <class Objects>
class ArgumentParser {
 public:
  using Object = typename Objects::Object;

  explicit ArgumentParser(const char* op) : op_(op) {}

  // TypeError for anything but keys; ValueError for an empty list.
  Keys keys(const Object& object) const {
    Keys result;
    if (!Objects::is_list(object)) {
      result.list.push_back(key(object));
      return result;
    }
    result.single = false;
    const int64_t size = Objects::size(object);
    TORCH_CHECK_VALUE(
        size != 0, op_, ": expected at least one key, but got an empty list");
    result.list.reserve(size);
    for (int64_t i = 0; i < size; ++i) {
      result.list.push_back(key(Objects::item(object, i)));
    }
    return result;
  }

  // A single key. TypeError for a list or anything else.
  Key key(const Object& object) const {
    auto result = Objects::as_key(op_, object);
    TORCH_CHECK_TYPE(
        result.has_value(),
        op_,
        ": expected a key of type int or str, but got ",
        Objects::type_name(object));
    return *std::move(result);
  }

  // ValueError for an asynchronous call that would return new tensors, which
  // could not be used before its work is done.
  void check_sync_without_out(const Keys& keys, bool async_op) const {
    TORCH_CHECK_VALUE(
        !async_op,
        op_,
        ": expected an out with async_op=True, but got none ",
        keys.context());
  }

  // The tensors of `keys`; `what` is "value", "out" or "row_ids", for messages.
  // TypeError for anything but tensors; ValueError for an empty list, a wrong
  // number and lists that are nested too deep.
  Tensors tensors(const Keys& keys, const Object& object, const char* what)
      const {
    Tensors result;
    if (keys.single) {
      append_group(result, keys.list[0], object, what);
      return result;
    }
    const char* const plural = std::string_view(what) == "row_ids" ? "" : "s";
    TORCH_CHECK_VALUE(
        Objects::is_list(object),
        op_,
        ": expected a list of ",
        keys.size(),
        " ",
        what,
        plural,
        ", one for each key, but got ",
        Objects::type_name(object),
        " ",
        keys.context());
    const int64_t size = Objects::size(object);
    TORCH_CHECK_VALUE(
        size == keys.size(),
        op_,
        ": expected ",
        keys.size(),
        " ",
        what,
        plural,
        ", one for each key, but got ",
        size,
        " ",
        keys.context());
    for (int64_t i = 0; i < size; ++i) {
      append_group(result, keys.list[i], Objects::item(object, i), what);
    }
    return result;
  }

 private:
  void append_group(
      Tensors& result,
      const Key& key,
      const Object& object,
      const char* what) const {
    const Where where{op_, key};
    if (!Objects::is_list(object)) {
      result.append(tensor(key, object, what));
      result.end_group();
      return;
    }
    const int64_t size = Objects::size(object);
    TORCHKV_CHECK_VALUE(
        size != 0,
        where,
        "expected at least one tensor as ",
        what,
        ", but got an empty list");
    for (int64_t i = 0; i < size; ++i) {
      const Object item = Objects::item(object, i);
      TORCHKV_CHECK_VALUE(
          !Objects::is_list(item),
          where,
          "expected a tensor or a list of tensors as ",
          what,
          ", but got lists nested too deep");
      result.append(tensor(key, item, what));
    }
    result.end_group();
  }

  const at::Tensor& tensor(
      const Key& key,
      const Object& object,
      const char* what) const {
    const at::Tensor* result = Objects::as_tensor(object);
    const Where where{op_, key};
    TORCHKV_CHECK_TYPE(
        result != nullptr,
        where,
        "expected a tensor or a list of tensors as ",
        what,
        ", but got ",
        Objects::type_name(object));
    return *result;
  }

  const char* op_;
};

} // namespace torchkv
