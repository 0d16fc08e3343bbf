#pragma once

#include <ATen/ATen.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <deque>
#include <memory>
#include <set>
#include <utility>
#include <vector>

#include "comm/backends.h"
#include "core/plain_dispatch.h"
#include "store/arguments.h"

// A form of values that only tests have: equal elements, one after another, as
// one number and how many there are. The payload has the numbers, one or more,
// on any device.
namespace torchkv::testing {

constexpr const char* kRunLength = "run-length";

struct RunLength final : Encoding {
  RunLength(
      c10::IntArrayRef sizes_,
      c10::ScalarType dtype_,
      std::vector<int64_t> counts_)
      : counts(std::move(counts_)) {
    form = kRunLength;
    sizes.assign(sizes_.begin(), sizes_.end());
    dtype = dtype_;
  }

  const std::vector<int64_t> counts; // of each number
};

// The elements [begin, begin + out's), in order, of what the payload in CPU
// memory stands for.
inline void decode(
    const at::Tensor& payload,
    const RunLength& code,
    int64_t begin,
    at::Tensor& out) {
  int64_t end = 0; // of a run
  for (size_t i = 0; i < code.counts.size(); ++i) {
    const int64_t start = std::max<int64_t>(end - begin, 0);
    end += code.counts[i];
    const int64_t stop = std::min(end - begin, out.numel());
    if (start < stop) {
      out.narrow(0, start, stop - start)
          .fill_(payload[static_cast<int64_t>(i)]);
    }
  }
}

// Decodes values into dense ones, which it passes on.
class RunLengthBackend final : public Backend {
 public:
  struct Seen {
    std::set<int64_t> begins; // first elements that were asked for
    bool claims = true;
  };

  RunLengthBackend(Backends& backends, Seen& seen)
      : backends_(backends), seen_(seen) {}

  bool add(const Job& job) override {
    if (seen_.claims) {
      backends_.add(decoded(job));
    }
    return seen_.claims;
  }
  bool add_copy(const Slice& /*source*/, const at::Tensor& /*out*/) override {
    return false;
  }
  void run() override {}
  double squared_norm(double /*scale*/) override {
    return 0; // the dense backends have it
  }

 private:
  Job decoded(const Job& job) {
    auto& values = values_.emplace_back();
    for (const auto& value : job.values) {
      values.push_back(value.dense() != nullptr ? value : decoded(job, value));
    }
    Job result = job;
    result.values = values;
    return result;
  }

  // In CPU memory, where the fake GPUs have all operators.
  Value decoded(const Job& job, const Value& value) {
    seen_.begins.insert(value.begin);
    const auto& code = dynamic_cast<const RunLength&>(*value.encoding);
    Runtime& runtime = backends_.order().runtime();
    const Place& home = job.slice->home;
    backends_.order().use(home, value.device());
    backends_.order().sync();
    const PlainDispatch plain;
    const at::Tensor payload =
        at::empty(value.data->sizes(), value.data->scalar_type());
    runtime.copy(payload, *value.data);
    at::Tensor elements = at::empty(job.result->numel(), code.dtype);
    decode(payload, code, value.begin, elements);
    const at::Tensor& dense = tensors_.emplace_back(runtime.allocate(
        job.result->sizes(), job.result->strides(), code.dtype, home.device));
    runtime.copy(
        dense, elements.as_strided(job.result->sizes(), job.result->strides()));
    return Value(&dense);
  }

  Backends& backends_;
  Seen& seen_;
  std::deque<c10::SmallVector<Value, 4>> values_;
  std::deque<at::Tensor> tensors_;
};

// The form has a backend as long as this exists.
class RegisteredRunLength {
 public:
  RegisteredRunLength() {
    register_backend(kRunLength, [this](Backends& backends) {
      return std::make_unique<RunLengthBackend>(backends, seen);
    });
  }
  ~RegisteredRunLength() {
    register_backend(kRunLength, {});
  }
  RegisteredRunLength(const RegisteredRunLength&) = delete;
  RegisteredRunLength& operator=(const RegisteredRunLength&) = delete;
  RegisteredRunLength(RegisteredRunLength&&) = delete;
  RegisteredRunLength& operator=(RegisteredRunLength&&) = delete;

  RunLengthBackend::Seen seen;
};

// A value to push: encoded, or dense where there is no code.
struct Pushed {
  at::Tensor data;
  std::shared_ptr<const RunLength> code = nullptr;

  // In CPU memory, or on the device of a dense value.
  at::Tensor dense() const {
    if (code == nullptr) {
      return data;
    }
    at::Tensor elements =
        at::empty(c10::multiply_integers(code->sizes), code->dtype);
    decode(data.cpu(), *code, 0, elements);
    return elements.view(code->sizes);
  }
};

inline Pushed runs(
    std::vector<double> numbers,
    std::vector<int64_t> counts,
    c10::IntArrayRef sizes,
    c10::ScalarType dtype = c10::kFloat) {
  return {
      at::tensor(numbers, at::kDouble).to(dtype),
      std::make_shared<RunLength>(sizes, dtype, std::move(counts))};
}

inline Pushed constant(
    double number,
    c10::IntArrayRef sizes,
    c10::ScalarType dtype = c10::kFloat) {
  return runs({number}, {c10::multiply_integers(sizes)}, sizes, dtype);
}

// A group for each key, in their forms.
inline Tensors encoded(const std::vector<std::vector<Pushed>>& groups) {
  Tensors result;
  for (const auto& group : groups) {
    for (const auto& value : group) {
      result.append(value.data, value.code);
    }
    result.end_group();
  }
  return result;
}

// The same without codes.
inline Tensors dense(const std::vector<std::vector<Pushed>>& groups) {
  Tensors result;
  for (const auto& group : groups) {
    for (const auto& value : group) {
      result.append(value.dense());
    }
    result.end_group();
  }
  return result;
}

} // namespace torchkv::testing
