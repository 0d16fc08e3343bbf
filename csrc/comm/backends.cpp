#include "backends.h"

#include <c10/util/Exception.h>

#include <algorithm>
#include <map>
#include <mutex>

#include "../core/compressed.h"
#include "../core/row_sparse.h"
#include "compressed_backend.h"
#include "row_sparse_backend.h"

namespace torchkv {
namespace {

struct Registry {
  std::mutex mutex; // guards by_form
  std::map<std::string, MakeBackend> by_form;

  static Registry& get() {
    // Leaked: used until the process ends.
    static auto* registry = new Registry{
        {},
        {{kRowSparse, &RowSparseBackend::make},
         {kCompressed, &CompressedBackend::make}}};
    return *registry;
  }
};

MakeBackend find_backend(const std::string& form) {
  Registry& registry = Registry::get();
  const std::lock_guard lock(registry.mutex);
  const auto it = registry.by_form.find(form);
  return it == registry.by_form.end() ? nullptr : it->second;
}

} // namespace

void register_backend(const std::string& form, MakeBackend make) {
  Registry& registry = Registry::get();
  const std::lock_guard lock(registry.mutex);
  if (make == nullptr) {
    registry.by_form.erase(form);
  } else {
    registry.by_form[form] = std::move(make);
  }
}

bool has_backend(const std::string& form) {
  return find_backend(form) != nullptr;
}

Backends::~Backends() = default;

Backend& Backends::of_form(const char* form) {
  for (const auto& [name, backend] : others_) {
    if (name == form) {
      return *backend;
    }
  }
  const MakeBackend make = find_backend(form);
  TORCH_CHECK_NOT_IMPLEMENTED(
      make != nullptr,
      "push: expected a form with a backend, but got '",
      form,
      "'");
  others_.emplace_back(form, make(*this));
  return *others_.back().second;
}

// The only place that dispatches by the form of values.
void Backends::add(const Job& job) {
  const bool is_done = !job.is_norm && job.values.size() == 1 &&
      job.values[0].dense() != nullptr &&
      job.values[0].data->is_same(*job.result);
  if (job.result->numel() == 0 || is_done) {
    add_copies(job);
    return;
  }
  if (job.rows != nullptr) {
    aten_.add(job);
    return;
  }
  const auto* const encoded = std::find_if(
      job.values.begin(), job.values.end(), [](const Value& value) {
        return value.dense() == nullptr;
      });
  const bool is_dense = encoded == job.values.end();
  if (is_dense && cpu_.add(job)) {
    return;
  }
  add_copies(job);
  Job rest = job; // which backends may divide
  rest.outs = {};
  TORCH_CHECK_NOT_IMPLEMENTED(
      is_dense ? cuda_.add(rest) || aten_.add(rest)
               : of_form(encoded->encoding->form).add(rest),
      "push: expected values that a backend can add up on ",
      job.slice->home.device,
      ", but got ",
      is_dense ? "dense" : encoded->encoding->form,
      " values of dtype ",
      job.values[0].dtype(),
      " ",
      job.entry->key.context());
}

void Backends::add_copies(const Job& job) {
  for (const auto& out : job.outs) {
    copies_.add(*job.result, out);
  }
}

void Backends::add_copy(const Slice& source, const at::Tensor& out) {
  const bool is_added = source.home.device.is_cpu()
      ? cpu_.add_copy(source, out)
      : cuda_.add_copy(source, out);
  if (!is_added) {
    aten_.add_copy(source, out); // which accepts every copy
  }
}

void Backends::run() {
  // Other forms first: they may add work to the dense backends.
  for (const auto& other : others_) {
    other.second->run();
  }
  cpu_.run();
  cuda_.run();
  aten_.run();
  copies_.run();
}

double Backends::squared_norm(double scale) {
  double result = 0;
  for (const auto& other : others_) {
    result += other.second->squared_norm(scale);
  }
  return result + cpu_.squared_norm(scale) + cuda_.squared_norm(scale) +
      aten_.squared_norm(scale);
}

} // namespace torchkv
