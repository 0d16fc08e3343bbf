// What a C++ program on LibTorch writes to use an installed torchkv.
#include <ATen/ATen.h>
#include <torchkv/kvstore.h>

#include <cstdio>

int main() {
  const auto store = c10::make_intrusive<torchkv::KVStore>("local");
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
