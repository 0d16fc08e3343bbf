// A C++ program on LibTorch that knows torchkv by an archive only: the module
// in it holds a store. Its one argument is the archive.
#include <torch/script.h>

#include <cstdio>

int main(int argc, char** argv) {
  if (argc != 2) {
    std::puts("expected an archive");
    return 2;
  }
  auto module = torch::jit::load(argv[1]);
  const auto ones = at::ones({2, 3});
  const auto sum = module.forward({ones}).toTensor();
  if (!at::equal(sum, 3 * ones)) {
    std::puts("forward: expected all threes");
    return 1;
  }
  std::puts("a C++ program ran a module with a store");
  return 0;
}
