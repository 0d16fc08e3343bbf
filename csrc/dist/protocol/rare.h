#pragma once

#include <memory>
#include <optional>
#include <utility>

namespace torchkv::dist {

// As std::optional, but a pointer where there is no value: for what few of many
// objects have.
template <class T>
class Rare {
 public:
  Rare() = default;
  Rare(std::nullopt_t /*none*/) {} // NOLINT(google-explicit-constructor)
  Rare(T value) // NOLINT(google-explicit-constructor)
      : value_(std::make_unique<T>(std::move(value))) {}
  Rare(std::optional<T> value) { // NOLINT(google-explicit-constructor)
    if (value) {
      value_ = std::make_unique<T>(std::move(*value));
    }
  }
  Rare(const Rare& other) : Rare(std::optional<T>(other)) {}
  Rare(Rare&&) noexcept = default;
  Rare& operator=(const Rare& other) {
    if (this != &other) {
      *this = Rare(other);
    }
    return *this;
  }
  Rare& operator=(Rare&&) noexcept = default;
  ~Rare() = default;

  // NOLINTNEXTLINE(google-explicit-constructor)
  operator std::optional<T>() const {
    return value_ ? std::optional<T>(*value_) : std::nullopt;
  }
  explicit operator bool() const {
    return has_value();
  }
  bool has_value() const {
    return value_ != nullptr;
  }
  // REQUIRES of the next four: has_value().
  T& operator*() {
    return *value_;
  }
  const T& operator*() const {
    return *value_;
  }
  T* operator->() {
    return value_.get();
  }
  const T* operator->() const {
    return value_.get();
  }
  T& emplace() {
    value_ = std::make_unique<T>();
    return *value_;
  }
  void reset() {
    value_.reset();
  }

  friend bool operator==(const Rare& a, const Rare& b) {
    return a.has_value() == b.has_value() && (!a || *a == *b);
  }

 private:
  std::unique_ptr<T> value_;
};

} // namespace torchkv::dist
