#pragma once

#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "../core/export.h"
#include "../device/stream_order.h"
#include "aten_backend.h"
#include "backend.h"
#include "cpu_backend.h"
#include "cuda_backend.h"

namespace torchkv {

// The backends of one call: those for dense values in the order cpu, cuda,
// aten, and those that are registered for other forms of values, which get each
// job with such a value.
class TORCHKV_API Backends {
 public:
  explicit Backends(StreamOrder& order)
      : cpu_(order.runtime()),
        cuda_(order),
        aten_(cpu_, cuda_, order),
        order_(order) {}
  ~Backends();
  Backends(const Backends&) = delete; // backends refer to each other
  Backends& operator=(const Backends&) = delete;

  // As those of Backend. NotImplementedError for values that no backend claims.
  void add(const Job& job);
  void add_copy(const Slice& source, const at::Tensor& out);
  void run();
  double squared_norm(double scale);

  StreamOrder& order() const {
    return order_;
  }

 private:
  Backend& of_form(const char* form);
  void add_copies(const Job& job);

  CpuBackend cpu_;
  CudaBackend cuda_;
  AtenBackend aten_;
  StreamOrder& order_;
  kernels::cpu::CopyBatch copies_; // of outs, after all else
  std::vector<std::pair<std::string, std::unique_ptr<Backend>>> others_;
};

// Makes the backend of a form for one call; it may pass jobs with dense values
// on to the other backends.
using MakeBackend = std::function<std::unique_ptr<Backend>(Backends& backends)>;

// Registers the backend for values of `form`; an empty function unregisters it.
// Thread-safe.
TORCHKV_API void register_backend(const std::string& form, MakeBackend make);
TORCHKV_API bool has_backend(const std::string& form);

} // namespace torchkv
