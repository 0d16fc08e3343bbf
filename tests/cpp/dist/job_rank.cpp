// One rank of a job, without Python: tests/dist/test_cpp_program.py starts it
// with the environment variables of torchrun, alone or beside ranks in Python.
//
//   torchkv_job_rank TYPE [MODULE]
//
// With MODULE, the file of a TorchScript module, the module's forward(type)
// does the work and returns what is said.
//
// It ends without close(), as a program may that returns from main.
#include <ATen/ATen.h>
#include <torch/script.h>

#include <cstdio>
#include <exception>
#include <string>

#include "kvstore.h"

namespace {

constexpr int64_t kSharded = 100'000; // elements: over all ranks
constexpr int kSteps = 3;

// The one number that all elements have.
double only(const at::Tensor& value) {
  TORCH_CHECK(
      at::equal(value, at::full_like(value, value.flatten()[0].item())),
      "expected equal elements, but got ",
      value);
  return value.flatten()[0].item<double>();
}

void run(const std::string& type) {
  const auto kv = c10::make_intrusive<torchkv::KVStore>(type);
  const torchkv::Keys keys{torchkv::Key("w"), torchkv::Key("sharded")};
  const auto filled = [](double number) {
    return torchkv::Tensors::one_each(
        {at::full({2, 3}, number), at::full({kSharded}, number)});
  };
  const auto rank = static_cast<double>(kv->rank());
  kv->init(keys, filled(100 * rank)); // rank 0's count
  kv->set_optimizer("sgd", {{"lr", 1}});
  kv->barrier();
  for (int step = 0; step < kSteps; ++step) {
    kv->push(keys, filled(step + rank));
  }
  kv->barrier();
  const auto values = kv->pull(keys);
  std::printf(
      "rank %d of %d, %d lost: w %g, sharded %g, %d updates\n",
      static_cast<int>(kv->rank()),
      static_cast<int>(kv->num_workers()),
      static_cast<int>(kv->num_dead_node()),
      only(values[0]),
      only(values[1]),
      static_cast<int>(kv->version("w")));
}

} // namespace

int main(int argc, char** argv) {
  try {
    const std::string type = argc > 1 ? argv[1] : "dist_sync";
    if (argc > 2) {
      auto module = torch::jit::load(argv[2]);
      std::printf("%s\n", module.forward({type}).toStringRef().c_str());
    } else {
      run(type);
    }
    return 0;
  } catch (const c10::Error& error) {
    std::fprintf(stderr, "%s\n", error.what_without_backtrace());
  } catch (const std::exception& error) {
    std::fprintf(stderr, "%s\n", error.what());
  }
  return 1;
}
