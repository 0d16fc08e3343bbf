// Many threads, random operations, two stores; run under ThreadSanitizer, which
// finds the races, while the program checks what must hold at every moment:
// a value is never torn, and no push is lost.
//
// The sanitizer sees only code that was compiled for it. PyTorch was not, so
// all that matters here is written by torchkv's own kernels, or by the updater
// below.
#include <ATen/ATen.h>
#include <ATen/Parallel.h>

#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <random>
#include <thread>
#include <vector>

#include "errors.h"
#include "kvstore.h"

namespace {

using torchkv::Key;
using torchkv::Tensors;
using torchkv::UnknownKeyError;

constexpr int kThreads = 8;
constexpr int kSteps = 400;
constexpr int kSize = 64;
constexpr int64_t kCounters = 3; // keys [0, 3): an updater counts pushes
constexpr int64_t kTransient = 4; // keys [0, 4) that come and go, by ASSIGN

void require(bool condition, const char* what) {
  if (!condition) {
    std::fprintf(stderr, "stress: %s\n", what);
    std::exit(1);
  }
}

class Add final : public torchkv::OpaqueUpdater {
 public:
  void update(
      const Key& /*key*/,
      const at::Tensor& input,
      const at::Tensor& stored) override {
    auto* sum = stored.mutable_data_ptr<float>();
    const auto* added = input.const_data_ptr<float>();
    for (int64_t i = 0; i < stored.numel(); ++i) {
      sum[i] += added[i];
    }
    ++calls; // no atomic: the updater's mutex is what orders it
  }
  std::optional<torchkv::KeyKind> key_kind() const override {
    return torchkv::KeyKind::kInt;
  }
  at::Tensor serialize() const override {
    return {};
  }
  int64_t calls = 0;
};

bool is_uniform(const at::Tensor& tensor) {
  const auto* data = tensor.const_data_ptr<float>();
  for (int64_t i = 1; i < tensor.numel(); ++i) {
    if (data[i] != data[0]) {
      return false;
    }
  }
  return true;
}

// Counts into kCounters, so that the end can be checked.
void count(torchkv::KVStore& store, std::mt19937_64& random, int64_t& pushed) {
  const auto key = static_cast<int64_t>(random() % kCounters);
  const at::Tensor one = at::ones(kSize);
  switch (random() % 3) {
    case 0:
      store.push(key, one);
      pushed += 1;
      break;
    case 1:
      store.push({0, 1, 2}, Tensors::one_each({one, one, one}));
      pushed += kCounters;
      break;
    default: {
      const at::Tensor out = at::zeros(kSize);
      store.pushpull(key, Tensors::replicas({one, one}), out);
      require(is_uniform(out), "a pushpull saw a torn value");
      pushed += 2;
    }
  }
}

// Keys appear, change and vanish under the other threads.
void churn(
    torchkv::KVStore& store,
    std::mt19937_64& random,
    std::atomic<int64_t>& refused) {
  const Key key = static_cast<int64_t>(random() % kTransient);
  try {
    switch (random() % 8) {
      case 0:
        store.erase(key);
        break;
      case 1:
      case 2:
        store.init(key, at::full(kSize, 1.F));
        break;
      case 3:
        store.push(key, at::full(kSize, 2.F));
        break;
      case 4: {
        const at::Tensor value = at::full(kSize, 3.F);
        store.push(key, Tensors::replicas({value, value}));
        break;
      }
      default: {
        const at::Tensor out = at::zeros(kSize);
        store.pull(key, out);
        require(is_uniform(out), "a pull saw a torn value");
      }
    }
  } catch (const UnknownKeyError&) {
    ++refused; // not there at the moment
  } catch (const c10::ValueError&) {
    ++refused; // there already
  }
}

void look(torchkv::KVStore& store) {
  store.repr();
  for (const auto& value : store.state().values) {
    require(is_uniform(value), "a snapshot saw a torn value");
  }
}

} // namespace

int main() {
  // One: PyTorch's OpenMP runtime is not built for the sanitizer.
  at::set_num_threads(1);
  const auto store = c10::make_intrusive<torchkv::KVStore>();
  const auto assigned = c10::make_intrusive<torchkv::KVStore>();
  const auto updater = std::make_shared<Add>();
  const at::Tensor zero = at::zeros(kSize);
  store->init({0, 1, 2}, Tensors::one_each({zero, zero, zero}));
  store->set_updater(updater);

  std::atomic<int64_t> pushed{0};
  std::atomic<int64_t> refused{0};
  std::vector<std::thread> threads;
  threads.reserve(kThreads);
  for (int t = 0; t < kThreads; ++t) {
    threads.emplace_back([&, t] {
      std::mt19937_64 random(t);
      int64_t mine = 0;
      for (int step = 0; step < kSteps; ++step) {
        const auto choice = random() % 10;
        if (choice < 5) {
          count(*store, random, mine);
        } else if (choice < 9) {
          churn(*assigned, random, refused);
        } else {
          look(*store);
          look(*assigned);
        }
      }
      pushed += mine;
    });
  }
  for (auto& thread : threads) {
    thread.join();
  }

  double total = 0;
  for (const auto& value : store->pull({0, 1, 2})) {
    total += value[0].item<double>();
  }
  require(total == static_cast<double>(pushed), "a push was lost");
  require(updater->calls > 0, "the updater never ran");
  require(refused > 0, "keys never came and went");
  std::printf(
      "stress: %lld pushed in %d threads, none lost; %lld calls came too early or "
      "too late for their key\n",
      static_cast<long long>(pushed),
      kThreads,
      static_cast<long long>(refused));
  return 0;
}
