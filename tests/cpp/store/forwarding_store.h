#pragma once

#include <c10/util/FunctionRef.h>

#include <memory>
#include <optional>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include "store/store.h"

namespace torchkv::testing {

// A store that hands each call to another one in the same process, through a
// queue and threads of its own: what a store on several machines has to do,
// without the machines. An updater runs on a thread that Python has not made.
class ForwardingStore final : public Store {
 public:
  explicit ForwardingStore(std::unique_ptr<Store> inner);
  ~ForwardingStore() override;
  ForwardingStore(const ForwardingStore&) = delete;
  ForwardingStore& operator=(const ForwardingStore&) = delete;
  ForwardingStore(ForwardingStore&&) = delete;
  ForwardingStore& operator=(ForwardingStore&&) = delete;

  WorkPtr insert(const Call& call) override {
    return forward([&] { return inner_->insert(call); });
  }
  WorkPtr merge(const Call& call) override {
    return forward([&] { return inner_->merge(call); });
  }
  WorkPtr pull(const Call& call) override {
    return forward([&] { return inner_->pull(call); });
  }
  std::vector<at::Tensor> pull(const Keys& keys, const CallOptions& options)
      override {
    return forward([&] { return inner_->pull(keys, options); });
  }
  void pull_rows(const char* op, c10::ArrayRef<RowPull> pulls) override {
    forward([&] { inner_->pull_rows(op, pulls); });
  }
  c10::Device row_device(const char* op, const Key& key) const override {
    return forward([&] { return inner_->row_device(op, key); });
  }
  int64_t num_rows(const char* op, const Key& key) const override {
    return forward([&] { return inner_->num_rows(op, key); });
  }
  void init_rows(const Key& key, const Meta& meta, const RowInit& init)
      override {
    forward([&] { inner_->init_rows(key, meta, init); });
  }
  void erase_rows(
      const char* op,
      const Keys& keys,
      c10::ArrayRef<at::Tensor> ids) override {
    forward([&] { inner_->erase_rows(op, keys, ids); });
  }
  void assign(const Call& call) override {
    forward([&] { inner_->assign(call); });
  }
  void erase(const Keys& keys) override {
    forward([&] { inner_->erase(keys); });
  }

  int64_t version(const Key& key) override {
    return forward([&] { return inner_->version(key); });
  }
  int64_t num_steps() override {
    return forward([&] { return inner_->num_steps(); });
  }
  std::vector<Key> keys() const override {
    return forward([&] { return inner_->keys(); });
  }
  std::optional<Meta> meta(const char* op, const Key& key) const override {
    return forward([&] { return inner_->meta(op, key); });
  }
  StoreStatus status() const override {
    return forward([&] { return inner_->status(); });
  }
  Updater updater() const override {
    return forward([&] { return inner_->updater(); });
  }

  void set_compression(const Compression& compression) override {
    forward([&] { inner_->set_compression(compression); });
  }
  CompressionPtr compression() const override {
    return forward([&] { return inner_->compression(); });
  }
  void set_updater(std::shared_ptr<OpaqueUpdater> updater) override {
    forward([&] { inner_->set_updater(std::move(updater)); });
  }
  uint64_t set_optimizer(Optimizer optimizer, bool keep_state, bool check_keys)
      override {
    return forward([&] {
      return inner_->set_optimizer(
          std::move(optimizer), keep_state, check_keys);
    });
  }
  std::vector<KeyStats> stats(const Keys& keys) override {
    return forward([&] { return inner_->stats(keys); });
  }
  void expect_keys(const Keys& keys) override {
    forward([&] { inner_->expect_keys(keys); });
  }
  std::vector<KeyState> optimizer_states(const Keys& keys) override {
    return forward([&] { return inner_->optimizer_states(keys); });
  }
  void set_optimizer_states(
      const Keys& keys,
      const std::vector<KeyState>& states) override {
    forward([&] { inner_->set_optimizer_states(keys, states); });
  }

  StoreState state(bool with_keys, bool with_updater) const override {
    return forward([&] { return inner_->state(with_keys, with_updater); });
  }
  void load(StoreState state) override {
    forward([&] { inner_->load(std::move(state)); });
  }
  void take(Store& other, bool keeps_updater) override {
    Store& others_inner = *dynamic_cast<ForwardingStore&>(other).inner_;
    forward([&] { inner_->take(others_inner, keeps_updater); });
  }
  // Not forwarded: a garbage collector waits for nobody.
  void visit_sole_updater(
      c10::function_ref<void(const OpaqueUpdater&)> visit) const override {
    inner_->visit_sole_updater(visit);
  }
  int64_t rank() const override {
    return inner_->rank();
  }
  int64_t num_workers() const override {
    return inner_->num_workers();
  }
  int64_t num_dead_node() const override {
    return forward([&] { return inner_->num_dead_node(); });
  }
  void barrier() override {
    forward([&] { inner_->barrier(); });
  }
  void close() override {
    forward([&] { inner_->close(); });
  }

 private:
  class Workers;

  // Runs the call on a thread of the workers; returns or throws what it does.
  template <class Call>
  std::invoke_result_t<Call> forward(Call call) const {
    using Result = std::invoke_result_t<Call>;
    if constexpr (std::is_void_v<Result>) {
      run(call);
    } else {
      std::optional<Result> result;
      run([&] { result.emplace(call()); });
      return *std::move(result);
    }
  }
  void run(c10::function_ref<void()> call) const;

  const std::unique_ptr<Store> inner_;
  std::unique_ptr<Workers> workers_;
};

// From now on stores of `type` forward to what was made for it before.
void forward_stores_of(const std::string& type);

} // namespace torchkv::testing
