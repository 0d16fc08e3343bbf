// What the ranks of a DistStore tell each other when a store is saved or
// loaded.
#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>
#include <c10/util/Exception.h>

#include <utility>

#include "../update/script_archives.h"
#include "../update/script_updater.h"
#include "dist_store.h"

namespace torchkv::dist {
namespace {

constexpr auto* kGather = "save";

} // namespace

// A store for bytes, of the same ranks: made when it is first needed.
DistStore& DistStore::exchange_store() {
  if (exchange_ == nullptr) {
    StoreOptions options;
    options.name = c10::str(name_, "#exchange");
    options.rank = rank();
    options.world_size = num_workers();
    options.rendezvous = node_->rendezvous();
    options.security = node_->security();
    options.timeout = timeout_;
    options.heartbeat = session_->config().heartbeat;
    Policy policy;
    policy.quorum = 1;
    exchange_ =
        std::make_unique<DistStore>("dist_async", policy, runtime_, options);
  }
  return *exchange_;
}

// Each rank's bytes, on rank 0 or on all.
std::vector<at::Tensor> DistStore::gather(
    const at::Tensor& bytes,
    bool to_all) {
  DistStore& store = exchange_store();
  const int64_t ranks = num_workers();
  // Int keys: the sizes, then each rank's bytes.
  const Tensors no_sizes(at::zeros({ranks}, at::kLong));
  store.insert({kGather, Key(-1), &no_sizes});
  for (int64_t i = 0; i < ranks; ++i) { // one at a time: ASSIGN keeps the last
    if (i == rank()) {
      const Tensors current = Tensors::one_each(store.pull(Key(-1), {}));
      current.flat[0].data_ptr<int64_t>()[i] = bytes.numel();
      store.merge({kGather, Key(-1), &current});
      store.session_->flush();
    }
    store.barrier();
  }
  const at::Tensor sizes = store.pull(Key(-1), {})[0];
  Keys keys(Key(-1));
  keys.single = false;
  std::vector<at::Tensor> result;
  for (int64_t i = 0; i < ranks; ++i) {
    const Tensors empty(at::empty({sizes.data_ptr<int64_t>()[i]}, at::kByte));
    store.insert({kGather, Key(i), &empty});
    keys.list.push_back(Key(i));
  }
  const Tensors own(bytes);
  store.merge({kGather, Key(rank()), &own});
  store.session_->flush();
  store.barrier();
  for (int64_t i = 0; i < ranks && (to_all || rank() == 0); ++i) {
    result.push_back(store.pull(Key(i), {})[0]);
  }
  store.erase(keys);
  return result;
}

// The servers' copies of a TorchScript updater, each with a state of its own;
// on rank 0.
std::vector<at::Tensor> DistStore::gather_scripts() {
  const int64_t epoch = this->epoch();
  const auto script = session_->applier().script(epoch);
  auto archives = gather(
      script != nullptr ? serialize_updater(*script)
                        : at::empty({0}, at::kByte),
      /*to_all=*/false);
  if (archives.empty()) {
    return {};
  }
  // As it was set, where no key of the server has been updated.
  at::Tensor set;
  {
    const std::lock_guard lock(updater_mutex_);
    set = spec_.archive;
  }
  const at::Tensor first = ScriptUpdater::load(set)->serialize();
  for (auto& archive : archives) {
    if (archive.numel() == 0) {
      archive = first;
    }
  }
  return {pack_archives(archives)};
}

// This rank's copy of a saved TorchScript updater. All ranks refuse what one
// cannot load.
std::shared_ptr<OpaqueUpdater> DistStore::own_script(
    const char* op,
    const at::Tensor& bytes) const {
  const auto archives = unpack_archives(bytes);
  TORCH_CHECK_VALUE(
      archives.size() == 1 ||
          archives.size() == static_cast<size_t>(num_workers()),
      op,
      ": expected as many ranks as have saved the store, ",
      archives.size(),
      ", but got ",
      num_workers(),
      ": the updater has a state of its own on each");
  std::vector<std::shared_ptr<OpaqueUpdater>> scripts;
  scripts.reserve(archives.size());
  for (const auto& archive : archives) {
    try {
      scripts.push_back(ScriptUpdater::load(archive));
    } catch (const c10::Error& error) {
      TORCH_CHECK_VALUE(
          false,
          op,
          ": expected an updater that TorchScript can read, but got bytes that "
          "it refuses: ",
          error.what_without_backtrace());
    }
  }
  return scripts[scripts.size() == 1 ? 0 : static_cast<size_t>(rank())];
}

} // namespace torchkv::dist
