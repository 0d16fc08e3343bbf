// Host time of a push and a pull of a model on one GPU, with a fake GPU whose
// launches do nothing. For `make host-time`; needs no GPU.
#include <ATen/ATen.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstring>
#include <functional>
#include <vector>

#include "kernels/cuda/library.h"
#include "kvstore.h"
#include "mock_cuda.h"

namespace torchkv {
namespace {

constexpr int kNumKeys = 161; // of ResNet-50
constexpr int kNumReplicas = 2;
constexpr int kNumCalls = 2000;
constexpr double kLimit = 45; // us, push and pull together

// Counts launches without running them, but copies their parameters, as CUDA
// does.
int num_launches = 0;

int launch(kernels::cuda::Launch launch) {
  static std::vector<char> copy(kernels::cuda::kLargeParams);
  std::memcpy(copy.data(), launch.params, launch.params_bytes);
  ++num_launches;
  return 0;
}

const kernels::cuda::Table& stub() {
  static const kernels::cuda::Table table{
      kernels::cuda::kAbi,
      static_cast<uint32_t>(kernels::cuda::kLargeParams),
      [](kernels::cuda::Variant, kernels::cuda::Launch call) {
        return launch(call);
      },
      &launch,
      [](int /*device*/, int* result) {
        *result = 132;
        return 0;
      },
      [](bool* result) {
        *result = true;
        return 0;
      },
      [](void* /*stream*/, bool* result) {
        *result = false;
        return 0;
      },
      [](int /*device*/, int /*peer*/) { return 0; },
      [](int /*error*/) { return ""; }};
  return table;
}

Tensors tensors(int num_replicas) {
  const auto on_gpu = at::device(c10::Device(c10::kCUDA, 0));
  Tensors result;
  for (int i = 0; i < kNumKeys; ++i) {
    for (int n = 0; n < num_replicas; ++n) {
      result.append(at::zeros({64 + i}, on_gpu));
    }
    result.end_group();
  }
  return result;
}

// Microseconds of each call, sorted.
std::vector<double> times(const std::function<void()>& call) {
  std::vector<double> result;
  for (int i = 0; i < kNumCalls; ++i) {
    const auto start = std::chrono::steady_clock::now();
    call();
    const std::chrono::duration<double, std::micro> time =
        std::chrono::steady_clock::now() - start;
    result.push_back(time.count());
  }
  std::sort(result.begin(), result.end());
  return result;
}

void run() {
  mock_cuda::reset(1);
  kernels::cuda::set_table(&stub());
  const auto store = c10::make_intrusive<KVStore>("device");
  Keys keys;
  keys.single = false;
  for (int i = 0; i < kNumKeys; ++i) {
    keys.list.emplace_back(i);
  }
  const Tensors gradients = tensors(kNumReplicas);
  const Tensors outs = tensors(kNumReplicas);
  store->init(keys, tensors(1));
  Optimizer optimizer;
  optimizer.groups.push_back(
      make_rule("host_time", "sgd", {{"lr", 0.1}, {"momentum", 0.9}}));
  store->set_optimizer(optimizer);
  store->push(keys, gradients); // creates the state
  num_launches = 0;
  const auto pushes = times([&] { store->push(keys, gradients); });
  const auto pulls = times([&] { store->pull(keys, outs); });
  std::printf(
      "%d keys, %d replicas, momentum, C++; %.1f launches a call\n"
      "          minimum   median\n"
      "push   %7.1f us %7.1f us\n"
      "pull   %7.1f us %7.1f us\n"
      "both   %7.1f us %7.1f us  (target: %.0f us)\n",
      kNumKeys,
      kNumReplicas,
      num_launches / (2.0 * kNumCalls),
      pushes[0],
      pushes[kNumCalls / 2],
      pulls[0],
      pulls[kNumCalls / 2],
      pushes[0] + pulls[0],
      pushes[kNumCalls / 2] + pulls[kNumCalls / 2],
      kLimit);
}

} // namespace
} // namespace torchkv

int main() {
  torchkv::run();
}
