// One rank of a job that counts heap allocations, for
// tests/dist/test_allocations.py, which starts it with the environment
// variables of torchrun.
//
// For each size of values and way to push and pull them, it prints their names
// and, of a step, how many allocations the process has made for each key, and
// how many of 64 KiB or more in all.
#include <ATen/ATen.h>

#include <atomic>
#include <cerrno>
#include <cstdio>
#include <cstdlib>
#include <exception>
#include <string>
#include <vector>

#include "kvstore.h"

// glibc lets a program replace malloc, and has these names for its own.
extern "C" {
void* __libc_malloc(size_t size);
void* __libc_calloc(size_t count, size_t size);
void* __libc_realloc(void* block, size_t size);
void* __libc_memalign(size_t alignment, size_t size);
}

namespace {

constexpr size_t kLarge = size_t{64} << 10U; // bytes
std::atomic<int64_t> num_all{0};
std::atomic<int64_t> num_large{0};

void count(size_t size) {
  num_all.fetch_add(1, std::memory_order_relaxed);
  if (size >= kLarge) {
    num_large.fetch_add(1, std::memory_order_relaxed);
  }
}

} // namespace

extern "C" {

void* malloc(size_t size) {
  count(size);
  return __libc_malloc(size);
}

void* calloc(size_t num, size_t size) {
  count(num * size);
  return __libc_calloc(num, size);
}

void* realloc(void* block, size_t size) {
  count(size);
  return __libc_realloc(block, size);
}

void* memalign(size_t alignment, size_t size) {
  count(size);
  return __libc_memalign(alignment, size);
}

void* aligned_alloc(size_t alignment, size_t size) {
  count(size);
  return __libc_memalign(alignment, size);
}

int posix_memalign(void** block, size_t alignment, size_t size) {
  count(size);
  *block = __libc_memalign(alignment, size);
  return *block == nullptr ? ENOMEM : 0;
}

} // extern "C"

namespace {

using torchkv::Key;
using torchkv::Keys;
using torchkv::Tensors;

constexpr int kSteps = 10;

struct Case {
  const char* name;
  int64_t num_keys;
  int64_t num_elements;
};
// Values that travel together; that have one server each; that are divided, in
// pieces.
constexpr Case kCases[] = {
    {"small", 1000, 100},
    {"medium", 200, 10'000},
    {"large", 8, 1'000'000}};

void run(const Case& which) {
  const auto kv = c10::make_intrusive<torchkv::KVStore>("dist_sync");
  Keys keys;
  keys.single = false;
  std::vector<at::Tensor> values;
  std::vector<at::Tensor> outs;
  for (int64_t i = 0; i < which.num_keys; ++i) {
    keys.list.emplace_back(i);
    values.push_back(at::ones({which.num_elements}));
    outs.push_back(at::empty({which.num_elements}));
  }
  const Tensors pushed = Tensors::one_each(values);
  const Tensors pulled = Tensors::one_each(outs);
  kv->init(keys, pushed);
  kv->set_optimizer("sgd", {{"lr", 1}});
  for (const bool is_one_call : {true, false}) {
    const auto steps = [&] {
      for (int i = 0; i < kSteps; ++i) {
        if (is_one_call) {
          kv->pushpull(keys, pushed, pulled);
        } else {
          kv->push(keys, pushed);
          kv->pull(keys, pulled);
        }
      }
      kv->barrier();
    };
    steps(); // buffers are made
    const int64_t all = num_all;
    const int64_t large = num_large;
    steps();
    std::printf(
        "%s %s %.2f %.2f\n",
        which.name,
        is_one_call ? "pushpull" : "push-pull",
        static_cast<double>(num_all - all) /
            static_cast<double>(kSteps * which.num_keys),
        static_cast<double>(num_large - large) / kSteps);
    kv->barrier();
  }
  const auto num_pushes = static_cast<float>(4 * kSteps);
  const auto ranks = static_cast<float>(kv->num_workers());
  TORCH_CHECK(outs[0].eq(1 - num_pushes * ranks).all().item<bool>());
  kv->barrier();
  kv->close();
}

} // namespace

int main() {
  try {
    for (const Case& which : kCases) {
      run(which);
    }
    return 0;
  } catch (const c10::Error& error) {
    std::fprintf(stderr, "%s\n", error.what_without_backtrace());
  } catch (const std::exception& error) {
    std::fprintf(stderr, "%s\n", error.what());
  }
  return 1;
}
