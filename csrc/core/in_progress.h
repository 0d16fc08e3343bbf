#pragma once

#include "export.h"

namespace torchkv {

// A per-thread stack of the objects in use. It detects a reentrant call, which
// would otherwise deadlock on a lock that its own thread holds. All binaries of
// a process share it.
template <class T>
class TORCHKV_API InProgress {
 public:
  // A thread that runs a call for another one, which waits for it, passes the
  // other's innermost(): those objects are in use here, too.
  explicit InProgress(const T* object, const InProgress* outer = innermost())
      : object_(object), outer_(outer), before_(innermost()) {
    innermost() = this;
  }
  ~InProgress() {
    innermost() = before_;
  }
  InProgress(const InProgress&) = delete;
  InProgress& operator=(const InProgress&) = delete;

  static bool contains(const T* object) {
    for (const InProgress* it = innermost(); it != nullptr; it = it->outer_) {
      if (it->object_ == object) {
        return true;
      }
    }
    return false;
  }

  static const InProgress*& innermost() {
    static thread_local const InProgress* value = nullptr;
    return value;
  }

 private:
  const T* object_;
  const InProgress* outer_;
  const InProgress* before_; // on this thread
};

} // namespace torchkv
