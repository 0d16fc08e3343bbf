#pragma once

#include <c10/util/intrusive_ptr.h>
#include <torch/csrc/utils/pybind.h>

#include <utility>

#include "../../core/key.h"

namespace torchkv {

// An argument of a bound class, for functions bound to Python. Where pybind11
// passes a null pointer for None, and uninitialized memory for an object whose
// __init__ never ran, this raises TypeError. It does not own the object: the
// Python object that was passed lives as long as the call.
template <class T>
class Bound {
 public:
  Bound() = default;
  explicit Bound(T* object) : object_(object) {}

  T* operator->() const {
    return object_;
  }
  T& operator*() const {
    return *object_;
  }
  c10::intrusive_ptr<T> pointer() const {
    return c10::intrusive_ptr<T>::reclaim_copy(object_);
  }

 private:
  T* object_ = nullptr;
};

} // namespace torchkv

namespace pybind11::detail {

// Keys become int or str; they are parsed by ArgumentParser.
template <>
struct type_caster<torchkv::Key> {
  static constexpr auto name = const_name("int | str");

  static handle cast(
      const torchkv::Key& key,
      return_value_policy /*policy*/,
      handle /*parent*/) {
    return key.kind() == torchkv::KeyKind::kInt ? py::int_(key.id()).release()
                                                : py::str(key.text()).release();
  }
};

template <class T>
struct type_caster<torchkv::Bound<T>> {
 public:
  PYBIND11_TYPE_CASTER(torchkv::Bound<T>, make_caster<T>::name);

  bool load(handle source, bool /*convert*/) {
    static auto* const type = type::of<T>().release().ptr();
    if (!PyObject_TypeCheck(
            source.ptr(), reinterpret_cast<PyTypeObject*>(type))) {
      return false; // "incompatible function arguments"
    }
    auto held = reinterpret_cast<instance*>(source.ptr())
                    ->get_value_and_holder(get_type_info(typeid(T)));
    if (!held.holder_constructed()) {
      throw type_error(
          std::string(reinterpret_cast<PyTypeObject*>(type)->tp_name) +
          ": expected an object that was initialized, but got one whose "
          "__init__ was not called");
    }
    value = torchkv::Bound<T>(held.holder<c10::intrusive_ptr<T>>().get());
    return true;
  }
};

} // namespace pybind11::detail
