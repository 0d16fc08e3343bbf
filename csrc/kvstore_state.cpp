// What a KVStore saves and loads.
#include <utility>

#include "core/errors.h"
#include "kvstore.h"
#include "store/store.h"

namespace torchkv {

StoreState KVStore::state(bool with_keys, bool with_updater) const {
  StoreState state = usable("save").state(with_keys, with_updater);
  state.type = type_;
  return state;
}

StoreState KVStore::gather_state(bool with_updater) {
  StoreState state = usable("save").gather_state(with_updater);
  state.type = type_;
  return state;
}

OwnState KVStore::own_state() {
  OwnState own = usable("save").own_state();
  own.state.type = type_;
  return own;
}

bool KVStore::holds(const Key& key) const {
  return usable("holds").holds(key);
}

void KVStore::begin_gather(const std::string& op) {
  usable(op.c_str()).begin_gather(op.c_str());
}

std::vector<at::Tensor> KVStore::gather(
    const std::string& op,
    int64_t stage,
    const at::Tensor& bytes,
    bool to_all) {
  return usable(op.c_str()).gather(op.c_str(), stage, bytes, to_all);
}

void KVStore::fail_gather(const std::string& text) {
  usable("save").fail_gather(text);
}

void KVStore::load(StoreState state) {
  usable("load").load(std::move(state));
}

void KVStore::restore_compression(const StoreState& state) {
  usable("load").restore_compression(state);
}

c10::intrusive_ptr<KVStore> KVStore::from_state(StoreState state) {
  auto result = c10::make_intrusive<KVStore>(state.type);
  result->store_->load(std::move(state));
  return result;
}

void KVStore::take(KVStore& other, bool keeps_updater) {
  TORCHKV_INTERNAL_ASSERT(type_ == other.type_ && this != &other);
  usable("load").take(*other.store_, keeps_updater);
}

} // namespace torchkv
