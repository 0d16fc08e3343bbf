// Many threads, random operations, six stores; run under ThreadSanitizer,
// which finds races, while the program checks invariants: no value is torn, and
// no push is lost.
//
// The sanitizer only sees code compiled for it, which PyTorch is not, so all
// relevant memory is written by torchkv's kernels or by the updater below.
#include <ATen/ATen.h>
#include <ATen/Parallel.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <random>
#include <thread>
#include <vector>

#include "core/errors.h"
#include "kvstore.h"

namespace {

using torchkv::Key;
using torchkv::Keys;
using torchkv::make_rule;
using torchkv::Optimizer;
using torchkv::Tensors;
using torchkv::UnknownKeyError;

constexpr int kThreads = 8;
constexpr int kSteps = 400;
constexpr int kSize = 64;
constexpr int64_t kCounters = 3; // keys [0, 3): an updater counts pushes
constexpr int64_t kTransient = 4; // keys [0, 4) that come and go, by ASSIGN
// Keys [0, 40) of the calls with lists. The sanitizer follows a thread that
// holds up to 64 mutexes.
constexpr int64_t kListed = 40;

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
    ++calls; // not atomic: guarded by the updater's mutex
  }
  std::optional<torchkv::KeyKind> key_kind() const override {
    return torchkv::KeyKind::kInt;
  }
  at::Tensor serialize() const override {
    return {};
  }
  int64_t calls = 0;
};

// What SGD of learning rate 1 does.
class Subtract final : public torchkv::OpaqueUpdater {
 public:
  void update(
      const Key& /*key*/,
      const at::Tensor& input,
      const at::Tensor& stored) override {
    auto* value = stored.mutable_data_ptr<float>();
    const auto* gradient = input.const_data_ptr<float>();
    for (int64_t i = 0; i < stored.numel(); ++i) {
      value[i] -= gradient[i];
    }
  }
  std::optional<torchkv::KeyKind> key_kind() const override {
    return std::nullopt;
  }
  at::Tensor serialize() const override {
    return {};
  }
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

// Counts into kCounters, which are checked at the end.
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
    ++refused; // does not exist now
  } catch (const c10::ValueError&) {
    ++refused; // exists already
  }
}

Tensors repeat(const at::Tensor& tensor, int64_t count) {
  return Tensors::one_each(std::vector<at::Tensor>(count, tensor));
}

Keys listed_keys() {
  Keys keys;
  keys.single = false;
  for (int64_t key = 0; key < kListed; ++key) {
    keys.list.emplace_back(key);
  }
  return keys;
}

// All or some of them, in any order.
Keys some_keys(std::mt19937_64& random) {
  Keys keys = listed_keys();
  std::shuffle(keys.list.begin(), keys.list.end(), random);
  if (random() % 2 == 0) {
    keys.list.erase(
        keys.list.begin() + 1 + random() % kListed, keys.list.end());
  }
  return keys;
}

// Each push of -1 adds 1, whichever of two updaters makes the step.
void count_by_lists(
    torchkv::KVStore& store,
    const std::shared_ptr<Subtract>& subtract,
    std::mt19937_64& random,
    int64_t& pushed) {
  const Keys keys = some_keys(random);
  const auto values = repeat(at::full(kSize, -1.F), keys.size());
  switch (random() % 6) {
    case 0:
      store.set_optimizer({{make_rule("stress", "sgd", {{"lr", 1}})}, {}, {}});
      break;
    case 1:
      store.set_updater(subtract);
      break;
    case 2:
      for (const auto& value : store.pull(keys)) {
        require(is_uniform(value), "a pull of a list saw a torn value");
      }
      break;
    case 3: {
      const at::Tensor out = at::zeros(kSize);
      store.pushpull(keys, values, repeat(out, keys.size()));
      require(is_uniform(out), "a shared out was torn");
      pushed += keys.size();
      break;
    }
    default:
      store.push(keys, values);
      pushed += keys.size();
  }
}

// An optimizer with state, whose numbers change while lists are pushed. With a
// gradient of 1 in all elements, and one in a while of NaN, which is skipped, a
// value stays uniform and its state counts the steps.
Optimizer adam(double lr) {
  Optimizer optimizer{
      {make_rule("stress", "adam", {{"lr", lr}, {"amsgrad", 1}})}, {}, {}};
  optimizer.gradient.max_norm = 10;
  optimizer.gradient.skip_nonfinite = true;
  return optimizer;
}

void optimize(
    torchkv::KVStore& store,
    std::mt19937_64& random,
    int64_t& pushed) {
  const Keys keys = some_keys(random);
  switch (random() % 8) {
    case 0:
      store.set_optimizer(
          adam(1e-3 * static_cast<double>(random() % 4)), /*keep_state=*/true);
      break;
    case 1:
      for (const auto& state : store.optimizer_states(keys)) {
        require(state.step >= 0, "a key has taken less than no step");
        for (const auto& [name, tensor] : state.tensors) {
          require(is_uniform(tensor), "a state is torn");
        }
      }
      break;
    case 2:
      for (const auto& state : store.state().states) {
        for (const auto& [name, tensor] : state.tensors) {
          require(is_uniform(tensor), "a snapshot saw a torn state");
        }
      }
      break;
    case 3:
      for (const auto& value : store.pull(keys)) {
        require(is_uniform(value), "a pull saw a torn step");
      }
      break;
    case 4:
      store.push(keys, repeat(at::full(kSize, NAN), keys.size()));
      break;
    default:
      store.push(keys, repeat(at::ones(kSize), keys.size()));
      pushed += keys.size();
  }
}

// Queries keys that are deleted concurrently: results must be owned by the
// caller. More dimensions than an entry holds without an allocation.
void inquire(
    torchkv::KVStore& store,
    std::mt19937_64& random,
    std::atomic<int64_t>& refused) {
  const std::vector<int64_t> shape{1, 1, 1, 2, 1, kSize / 2};
  const Key key = static_cast<int64_t>(random() % kTransient);
  try {
    switch (random() % 10) {
      case 0:
      case 1:
        store.erase(key);
        break;
      case 2:
      case 3:
        store.init(key, at::ones(shape));
        break;
      case 4:
        require(store.dtype(key) == at::kFloat, "a dtype is another's");
        break;
      case 5:
        require(store.optimizer_states(key).size() == 1, "states are missing");
        break;
      case 6:
        for (const auto& known : store.keys()) {
          require(known.id() < kTransient, "a key is none");
          store.contains(known);
        }
        break;
      case 7:
        store.push(key, at::ones(shape));
        require(store.grad_norm().has_value(), "a step had no norm");
        break;
      default:
        require(store.shape(key) == shape, "a shape is another's");
    }
  } catch (const UnknownKeyError&) {
    ++refused;
  } catch (const c10::ValueError&) {
    ++refused;
  }
}

// Pushes of compressed values, changes of the compression, and copies.
void compress(torchkv::KVStore& store, std::mt19937_64& random) {
  const auto key = static_cast<int64_t>(random() % 2);
  switch (random() % 8) {
    case 0: {
      constexpr std::array<const char*, 4> kCodecs{
          "none", "1bit", "2bit", "fp16"};
      store.set_gradient_compression(kCodecs.at(random() % kCodecs.size()));
      break;
    }
    case 1:
      for (const auto& residuals : store.state().residuals) {
        for (const auto& residual : residuals) {
          require(is_uniform(residual), "a residual is torn");
        }
      }
      break;
    case 2:
      require(is_uniform(store.pull(key)[0]), "a compressed value is torn");
      break;
    default:
      store.push(
          key,
          Tensors::replicas(
              std::vector<at::Tensor>(
                  random() % 3 + 1, at::full(kSize, 0.3F))));
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
  const auto listed = c10::make_intrusive<torchkv::KVStore>();
  const auto subtract = std::make_shared<Subtract>();
  listed->init(listed_keys(), repeat(zero, kListed));
  listed->set_updater(subtract);
  const auto optimized = c10::make_intrusive<torchkv::KVStore>();
  optimized->init(listed_keys(), repeat(zero, kListed));
  optimized->set_optimizer(adam(1e-3));
  const auto asked = c10::make_intrusive<torchkv::KVStore>();
  asked->set_optimizer(adam(1e-3));
  const auto compressed = c10::make_intrusive<torchkv::KVStore>("device");
  compressed->init({0, 1}, repeat(zero, 2));

  std::atomic<int64_t> pushed{0};
  std::atomic<int64_t> pushed_by_lists{0};
  std::atomic<int64_t> pushed_gradients{0};
  std::atomic<int64_t> refused{0};
  std::vector<std::thread> threads;
  threads.reserve(kThreads);
  for (int t = 0; t < kThreads; ++t) {
    threads.emplace_back([&, t] {
      std::mt19937_64 random(t);
      int64_t mine = 0;
      int64_t mine_by_lists = 0;
      int64_t my_gradients = 0;
      for (int step = 0; step < kSteps; ++step) {
        const auto choice = random() % 22;
        if (choice < 4) {
          count(*store, random, mine);
        } else if (choice < 8) {
          churn(*assigned, random, refused);
        } else if (choice < 11) {
          count_by_lists(*listed, subtract, random, mine_by_lists);
        } else if (choice < 14) {
          optimize(*optimized, random, my_gradients);
        } else if (choice < 18) {
          inquire(*asked, random, refused);
        } else if (choice < 21) {
          compress(*compressed, random);
        } else {
          look(*store);
          look(*assigned);
        }
      }
      pushed += mine;
      pushed_by_lists += mine_by_lists;
      pushed_gradients += my_gradients;
    });
  }
  for (auto& thread : threads) {
    thread.join();
  }

  const auto total = [](const std::vector<at::Tensor>& values) {
    double sum = 0;
    for (const auto& value : values) {
      require(is_uniform(value), "a value is torn");
      sum += value[0].item<double>();
    }
    return static_cast<int64_t>(sum);
  };
  require(total(store->pull({0, 1, 2})) == pushed, "a push was lost");
  require(
      total(listed->state().values) == pushed_by_lists,
      "a push of a list was lost");
  int64_t num_steps = 0;
  for (const auto& state : optimized->optimizer_states(listed_keys())) {
    num_steps += state.step;
  }
  require(num_steps == pushed_gradients, "a step was lost or came twice");
  require(optimized->num_skipped() > 0, "no push was skipped");
  require(updater->calls > 0, "the updater never ran");
  require(refused > 0, "keys never came and went");
  std::printf(
      "stress: %lld and, by lists, %lld pushed and %lld steps in %d threads, none "
      "lost; %lld calls came too early or too late for their key\n",
      static_cast<long long>(pushed),
      static_cast<long long>(pushed_by_lists),
      static_cast<long long>(num_steps),
      kThreads,
      static_cast<long long>(refused));
  return 0;
}
