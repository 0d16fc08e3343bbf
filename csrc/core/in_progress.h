#pragma once

namespace torchkv {

// A per-thread stack of the objects in use. It detects a reentrant call, which
// would otherwise deadlock on a lock that its own thread holds.
template <class T>
class InProgress {
 public:
  explicit InProgress(const T* object) : object_(object), outer_(innermost()) {
    innermost() = this;
  }
  ~InProgress() {
    innermost() = outer_;
  }
  InProgress(const InProgress&) = delete;
  InProgress& operator=(const InProgress&) = delete;
  InProgress(InProgress&&) = delete;
  InProgress& operator=(InProgress&&) = delete;

  static bool contains(const T* object) {
    for (const InProgress* it = innermost(); it != nullptr; it = it->outer_) {
      if (it->object_ == object) {
        return true;
      }
    }
    return false;
  }

 private:
  static const InProgress*& innermost() {
    static thread_local const InProgress* value = nullptr;
    return value;
  }

  const T* object_;
  const InProgress* outer_;
};

} // namespace torchkv
