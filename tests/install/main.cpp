// What a C++ program on LibTorch writes to use an installed torchkv.
#include <ATen/ATen.h>
#include <torchkv/kvstore.h>
#include <torchkv/store/registry.h>

#include <cstdio>

int main() {
  int num_made = 0;
  torchkv::register_store(
      "counted",
      [&](torchkv::Runtime& runtime, const torchkv::StoreOptions& options) {
        ++num_made;
        return torchkv::make_store("local", runtime, options);
      });
  const auto store = c10::make_intrusive<torchkv::KVStore>("counted");
  if (num_made != 1 || store->type() != "counted") {
    std::puts("register_store: expected a store of the new type");
    return 1;
  }
  const auto ones = at::ones({2, 3});
  store->init(3, ones);
  store->push(3, torchkv::Tensors::replicas({ones, ones}));
  auto out = at::zeros({2, 3});
  store->pull(3, out);
  if (!at::equal(out, 2 * ones)) {
    std::puts("pull: expected all twos");
    return 1;
  }
  std::puts("a C++ program pushed and pulled");
  return 0;
}
