// Built-in optimizers in a store: the steps of a plain loop in double, written
// from the documentation of torch.optim; their state; what happens to gradients
// before; and the same rules through ATen operators.
#include "optimizer.h"

#include <ATen/ATen.h>
#include <ATen/OpMathType.h>
#include <gtest/gtest.h>

#include <atomic>
#include <cmath>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "comm/comm_aten.h"
#include "comm/step_with_aten.h"
#include "error_text.h"
#include "errors.h"
#include "kernels/cpu/sum.h"
#include "kvstore.h"
#include "recording_runtime.h"
#include "rule_cases.h"

namespace torchkv {
namespace {

using testing::error_text;
using testing::rule_cases;
using testing::RuleCase;
using Store = c10::intrusive_ptr<KVStore>;

bool has(const std::string& text, const std::string& part) {
  return text.find(part) != std::string::npos;
}

Optimizer optimizer(const RuleSpec& rule, const NumbersByName& gradient = {}) {
  return {{rule}, {}, make_gradient("test", gradient)};
}

Optimizer optimizer(
    const char* rule,
    const NumbersByName& numbers,
    const NumbersByName& gradient = {}) {
  return optimizer(make_rule("test", rule, numbers), gradient);
}

Store store_with(const at::Tensor& value, Optimizer optimizer) {
  const auto store = c10::make_intrusive<KVStore>();
  store->init(1, value);
  store->set_optimizer(std::move(optimizer));
  return store;
}

at::Tensor value_of(const Store& store, const Key& key = 1) {
  return store->pull(key)[0];
}

KeyState state_of(const Store& store, const Key& key = 1) {
  return store->optimizer_states(key)[0];
}

int64_t bytes_of(const KeyState& state) {
  int64_t bytes = 0;
  for (const auto& [name, tensor] : state.tensors) {
    bytes += static_cast<int64_t>(tensor.nbytes());
  }
  return bytes;
}

// Close in both, the relative and the absolute sense.
void expect_close(
    const at::Tensor& actual,
    const at::Tensor& expected,
    double tolerance,
    const std::string& what = "") {
  EXPECT_TRUE(
      at::allclose(
          actual, expected.to(actual.scalar_type()), tolerance, tolerance))
      << what << '\n'
      << actual << '\n'
      << expected;
}

void expect_equal(const at::Tensor& actual, const at::Tensor& expected) {
  EXPECT_TRUE(at::equal(actual, expected)) << actual << '\n' << expected;
}

void expect_same_state(const KeyState& a, const KeyState& b) {
  EXPECT_EQ(a.step, b.step);
  EXPECT_EQ(a.num_accumulated, b.num_accumulated);
  EXPECT_EQ(a.tensors.size(), b.tensors.size());
  for (const auto& [name, tensor] : a.tensors) {
    ASSERT_EQ(b.tensors.count(name), 1) << name;
    expect_equal(tensor, b.tensors.at(name));
  }
}

// --- The plain loop

// One key of real numbers, one after another.
class Plain {
 public:
  explicit Plain(const at::Tensor& value)
      : w(numbers_of(value)), m_(w.size()), v_(w.size()), x_(w.size()) {}

  static std::vector<double> numbers_of(const at::Tensor& tensor) {
    at::Tensor real = tensor.resolve_conj().resolve_neg().contiguous();
    real = real.is_complex() ? at::view_as_real(real) : real;
    real = real.to(at::kDouble).contiguous();
    const auto* data = real.const_data_ptr<double>();
    return {data, data + real.numel()};
  }

  void step(const RuleSpec& rule, const at::Tensor& gradient) {
    const auto gradients = numbers_of(gradient);
    ++t_;
    if (t_ == 1 && rule.id == RuleSpec::Id::kAdagrad) {
      v_.assign(w.size(), rule.initial_accumulator_value);
    }
    std::vector<double> directions;
    double weight_norm = 0;
    double direction_norm = 0;
    for (size_t i = 0; i < w.size(); ++i) {
      const double g = rule.maximize ? -gradients[i] : gradients[i];
      if (rule.id == RuleSpec::Id::kLamb) {
        moments(rule, g, i);
        const double u = m_[i] / (1 - std::pow(rule.beta1, t_)) /
                (std::sqrt(v_[i] / (1 - std::pow(rule.beta2, t_))) + rule.eps) +
            rule.weight_decay * w[i];
        directions.push_back(u);
        weight_norm += w[i] * w[i];
        direction_norm += u * u;
      } else {
        w[i] = one(rule, g, i);
      }
    }
    for (size_t i = 0; i < directions.size(); ++i) {
      const double trust = weight_norm > 0 && direction_norm > 0
          ? std::sqrt(weight_norm / direction_norm)
          : 1;
      w[i] -= rule.lr * trust * directions[i];
    }
  }

  // In the shape and the dtype of `model`.
  at::Tensor like(const at::Tensor& model) const {
    const auto real = at::tensor(w, at::kDouble);
    if (!model.is_complex()) {
      return real.view(model.sizes()).to(model.scalar_type());
    }
    auto sizes = model.sizes().vec();
    sizes.push_back(2);
    return at::view_as_complex(real.view(sizes)).to(model.scalar_type());
  }

  std::vector<double> w;

 private:
  void moments(const RuleSpec& rule, double g, size_t i) {
    m_[i] = rule.beta1 * m_[i] + (1 - rule.beta1) * g;
    v_[i] = rule.beta2 * v_[i] + (1 - rule.beta2) * g * g;
  }

  double one(const RuleSpec& rule, double g, size_t i) {
    const double lr = rule.lr;
    double weight = w[i];
    if (rule.decoupled) {
      weight -= lr * rule.weight_decay * weight;
    } else if (rule.id != RuleSpec::Id::kLion) {
      g += rule.weight_decay * weight;
    }
    switch (rule.id) {
      case RuleSpec::Id::kSgd: {
        if (rule.momentum == 0) {
          return weight - lr * g;
        }
        double& b = m_[i];
        b = t_ == 1 ? g : rule.momentum * b + (1 - rule.dampening) * g;
        return weight - lr * (rule.nesterov ? g + rule.momentum * b : b);
      }
      case RuleSpec::Id::kAdam: {
        moments(rule, g, i);
        const double m = m_[i] / (1 - std::pow(rule.beta1, t_));
        // torch.optim takes the largest before the correction.
        x_[i] = std::max(x_[i], v_[i]);
        const double v =
            (rule.amsgrad ? x_[i] : v_[i]) / (1 - std::pow(rule.beta2, t_));
        return weight - lr * m / (std::sqrt(v) + rule.eps);
      }
      case RuleSpec::Id::kAdagrad:
        v_[i] += g * g;
        return weight -
            lr / (1 + (t_ - 1) * rule.lr_decay) * g /
            (std::sqrt(v_[i]) + rule.eps);
      case RuleSpec::Id::kRmsprop: {
        v_[i] = rule.alpha * v_[i] + (1 - rule.alpha) * g * g;
        x_[i] = rule.alpha * x_[i] + (1 - rule.alpha) * g;
        const double v = rule.centered ? v_[i] - x_[i] * x_[i] : v_[i];
        const double change = g / (std::sqrt(v) + rule.eps);
        m_[i] = rule.momentum * m_[i] + change;
        return weight - lr * (rule.momentum > 0 ? m_[i] : change);
      }
      case RuleSpec::Id::kLion: {
        const double c = rule.beta1 * m_[i] + (1 - rule.beta1) * g;
        m_[i] = rule.beta2 * m_[i] + (1 - rule.beta2) * g;
        return weight - lr * ((c > 0) - (c < 0) + rule.weight_decay * weight);
      }
      default:
        ADD_FAILURE();
        return 0;
    }
  }

  double t_ = 0;
  std::vector<double> m_;
  std::vector<double> v_;
  std::vector<double> x_; // the largest, or the mean
};

double tolerance_of(at::ScalarType dtype) {
  return c10::toRealValueType(dtype) == at::kDouble ? 1e-12 : 2e-5;
}

class OptimizerRuleTest : public ::testing::TestWithParam<RuleCase> {
 protected:
  void SetUp() override {
    at::manual_seed(0);
  }
  const RuleSpec& rule_ = GetParam().rule;
};

TEST_P(OptimizerRuleTest, StepsOfThePlainLoop) {
  for (const auto dtype :
       {at::kFloat, at::kDouble, at::kComplexFloat, at::kComplexDouble}) {
    for (const int64_t size : {1, 5, 300, 40000}) {
      const at::Tensor value = at::randn({size}, dtype);
      const auto store = store_with(value, optimizer(rule_));
      Plain plain(value);
      for (int i = 0; i < 6; ++i) {
        const at::Tensor a = at::randn({size}, dtype);
        const at::Tensor b = at::randn({size}, dtype);
        store->push(1, Tensors::replicas({a, b}));
        plain.step(rule_, a + b);
      }
      expect_close(
          value_of(store),
          plain.like(value),
          tolerance_of(dtype),
          c10::toString(dtype));
      EXPECT_EQ(state_of(store).step, 6);
    }
  }
}

// Values that lie across the stored one, repeat, or must be conjugated or
// negated first.
TEST_P(OptimizerRuleTest, GradientsOfAnyLayout) {
  for (const auto dtype : {at::kDouble, at::kComplexDouble}) {
    const at::Tensor value = at::randn({70, 33, 3}, dtype);
    const auto store = store_with(value, optimizer(rule_));
    // The state lies as the value does, whatever its strides.
    const auto turned = store_with(value.permute({2, 0, 1}), optimizer(rule_));
    Plain plain(value);
    const auto push = [&](const at::Tensor& gradient) {
      store->push(1, gradient);
      turned->push(1, gradient.permute({2, 0, 1}));
      plain.step(rule_, gradient);
    };
    push(at::randn({3, 33, 70}, dtype).permute({2, 1, 0}));
    push(at::randn({140, 33, 3}, dtype).slice(0, 1, 140, 2));
    push(at::randn({70, 1, 3}, dtype).expand({70, 33, 3}));
    push(at::randn({33, 70, 3}, dtype).transpose(0, 1));
    if (at::isComplexType(dtype)) {
      push(at::randn({70, 33, 3}, dtype).conj());
      push(at::_conj(at::randn({3, 33, 70}, dtype)).permute({2, 1, 0}));
    } else {
      push(at::_neg_view(at::randn({70, 33, 3}, dtype)));
      push(at::imag(at::conj(at::randn({70, 33, 3}, at::kComplexDouble))));
    }
    push(at::randn({70, 33, 3}, dtype));
    expect_close(value_of(store), plain.like(value), 1e-11);
    expect_close(value_of(turned), plain.like(value).permute({2, 0, 1}), 1e-11);
  }
}

TEST_P(OptimizerRuleTest, HalfPrecisionHasAMaster) {
  for (const auto dtype : {at::kHalf, at::kBFloat16, at::kComplexHalf}) {
    const at::Tensor value =
        at::randn({300}, at::toOpMathType(dtype)).to(dtype);
    const auto store = store_with(value, optimizer(rule_));
    Plain plain(value);
    for (int i = 0; i < 5; ++i) {
      const at::Tensor gradient =
          at::randn({300}, at::toOpMathType(dtype)).to(dtype);
      store->push(1, gradient);
      plain.step(rule_, gradient);
    }
    const at::Tensor master = state_of(store).tensors.at("master");
    EXPECT_EQ(master.scalar_type(), at::toOpMathType(dtype));
    expect_close(master, plain.like(master), 5e-5, c10::toString(dtype));
    expect_equal(
        at::view_as_real(value_of(store).to(at::kComplexFloat)),
        at::view_as_real(master.to(dtype).to(at::kComplexFloat)));
  }
}

TEST_P(OptimizerRuleTest, GradientsOfOtherDtypes) {
  const at::Tensor value = at::randn({300}, at::kFloat);
  const auto store = store_with(value, optimizer(rule_));
  Plain plain(value);
  for (int i = 0; i < 4; ++i) {
    const at::Tensor a = at::randn({300}, at::kDouble);
    const at::Tensor b = at::randint(-3, 3, {300}, at::kLong);
    const at::Tensor c = at::randn({300}).to(at::kBFloat16);
    store->push(1, Tensors::replicas({a, b, c}));
    plain.step(rule_, a + b + c.to(at::kDouble));
  }
  expect_close(value_of(store), plain.like(value), 2e-5);
  for (const auto& [name, tensor] : state_of(store).tensors) {
    EXPECT_EQ(tensor.scalar_type(), at::kFloat) << name;
  }
}

// A list in one pass, with keys of all sizes, as one key after another.
TEST_P(OptimizerRuleTest, AListOfKeys) {
  constexpr int64_t kKeys = 40;
  const auto store = c10::make_intrusive<KVStore>();
  store->set_optimizer(optimizer(rule_));
  Keys keys;
  keys.single = false;
  std::vector<at::Tensor> values;
  std::vector<Plain> plain;
  for (int64_t key = 0; key < kKeys; ++key) {
    keys.list.emplace_back(key);
    values.push_back(
        at::randn(
            {key == 7 ? 100000 : key * key},
            key % 2 == 0 ? at::kDouble : at::kFloat));
    plain.emplace_back(values.back());
  }
  store->init(keys, Tensors::one_each(values));
  for (int i = 0; i < 3; ++i) {
    std::vector<at::Tensor> gradients;
    for (int64_t key = 0; key < kKeys; ++key) {
      gradients.push_back(at::randn_like(values[key]));
      plain[key].step(rule_, gradients.back());
    }
    store->push(keys, Tensors::one_each(gradients));
  }
  const auto pulled = store->pull(keys);
  for (int64_t key = 0; key < kKeys; ++key) {
    expect_close(
        pulled[key],
        plain[key].like(pulled[key]),
        tolerance_of(pulled[key].scalar_type()),
        "key " + std::to_string(key));
  }
}

// Its bytes at any time are those of the options that have been used.
TEST_P(OptimizerRuleTest, StateAndRoundTrip) {
  const at::Tensor value = at::randn({7, 3});
  const auto store = store_with(value, optimizer(rule_));
  store->init(2, at::empty({0, 3})); // and one without elements
  const Keys both{1, 2};
  EXPECT_EQ(bytes_of(state_of(store)), 0);
  EXPECT_EQ(state_of(store).step, 0);
  const auto push = [&](const Store& to, double factor) {
    to->push(
        both, Tensors::one_each({at::full({7, 3}, factor), at::empty({0, 3})}));
  };
  push(store, 1);
  push(store, -2);
  int64_t num_states = 0;
  const KeyState state = state_of(store);
  for (const char* name : state_names(rule_)) {
    if (name != nullptr) {
      ++num_states;
      EXPECT_EQ(state.tensors.count(name), 1) << name;
      EXPECT_EQ(state_of(store, 2).tensors.count(name), 1) << name;
    }
  }
  EXPECT_EQ(bytes_of(state), num_states * 7 * 3 * 4);
  EXPECT_EQ(state_of(store, 2).step, 2);

  const auto copy =
      KVStore::from_state(StoreState::from_tuple(store->state().to_tuple()));
  expect_same_state(state_of(copy), state);
  const auto loaded = store_with(value_of(store), optimizer(rule_));
  loaded->init(2, at::empty({0, 3}));
  loaded->set_optimizer_states(both, store->optimizer_states(both));
  push(store, 3);
  push(copy, 3);
  push(loaded, 3);
  for (const auto& other : {copy, loaded}) {
    expect_equal(value_of(other), value_of(store));
    expect_same_state(state_of(other), state_of(store));
  }
}

// --- The same rules through ATen operators

TEST_P(OptimizerRuleTest, StepsOfAten) {
  for (const auto dtype :
       {at::kFloat, at::kDouble, at::kComplexFloat, at::kComplexDouble}) {
    const double tolerance =
        c10::toRealValueType(dtype) == at::kDouble ? 1e-12 : 1e-6;
    const at::Tensor weight = at::randn({300}, dtype);
    const at::Tensor weight_aten = weight.clone();
    kernels::cpu::State state;
    std::array<at::Tensor, kMaxStates> states_aten;
    const auto names = state_names(rule_);
    for (size_t k = 0; k < kMaxStates; ++k) {
      if (names[k] != nullptr) {
        state.states[k] =
            at::full({300}, rule_.initial_accumulator_value, dtype);
        if (dtype == at::kComplexFloat || dtype == at::kComplexDouble) {
          at::view_as_real(state.states[k])
              .fill_(rule_.initial_accumulator_value);
        }
        states_aten[k] = state.states[k].clone();
      }
    }
    for (int t = 1; t <= 5; ++t) {
      RuleStep step;
      step.rule = rule_;
      step.step = t;
      step.is_first = t == 1;
      step.scale = t == 2 ? 0.5 : 1;
      step.clip_value = t >= 3 ? 0.7 : 0;
      step.last_scale = t >= 4 ? 0.25 : 1;
      const at::Tensor gradient = at::randn({300}, dtype);
      const Value value{Value::Form::kDense, &gradient};
      kernels::cpu::SumBatch batch;
      batch.add(value, weight, dtype, step, state);
      const double norm = batch.squared_norm();
      EXPECT_NEAR(
          squared_norm_with_aten(step, gradient.clone()), norm, 1e-6 * norm);
      batch.run();
      step_with_aten(step, gradient.clone(), weight_aten, states_aten);
      expect_close(weight_aten, weight, tolerance, c10::toString(dtype));
      for (size_t k = 0; k < kMaxStates; ++k) {
        if (names[k] != nullptr) {
          expect_close(states_aten[k], state.states[k], tolerance, names[k]);
        }
      }
    }
  }
}

// Comm's path for accelerators, with a runtime whose devices are CPU memory:
// as it is on the CPU, and as it began there.
TEST_P(OptimizerRuleTest, OnADevice) {
  for (const auto dtype : {at::kFloat, at::kBFloat16, at::kComplexFloat}) {
    testing::RecordingRuntime runtime;
    CommAten comm(CommAten::Home::kDevice, runtime);
    const auto random = [&] {
      return at::randn({33, 5}, at::toOpMathType(dtype)).to(dtype);
    };
    const at::Tensor value = random();
    Entry entry(1, {{33, 5}, dtype, 33 * 5});
    comm.store(entry, value);
    const auto store = store_with(value, optimizer(rule_));
    const at::Tensor somewhere =
        at::empty({33, 5}, at::TensorOptions().device(at::kMeta));
    for (int t = 1; t <= 4; ++t) {
      if (t == 3) { // by now it has state
        comm.place(entry, somewhere);
        EXPECT_TRUE(entry.slices[0].home.is_meta());
      }
      const std::vector<at::Tensor> gradients{random(), random()};
      store->push(1, Tensors::replicas(gradients));
      const std::vector<Value> values{
          {Value::Form::kDense, &gradients[0]},
          {Value::Form::kDense, &gradients[1]}};
      RuleStep step;
      step.rule = rule_;
      step.step = t;
      Item item{&entry, values, {}, &step};
      if (t == 4) { // the sum of two pushes
        comm.accumulate(
            Item{&entry, c10::ArrayRef<Value>(values[0]), {}, nullptr});
        entry.num_accumulated = 1;
        item.values = values[1];
      }
      comm.reduce_update(item);
      entry.step = t;
      entry.num_accumulated = 0;
    }
    const KeyState expected = state_of(store);
    const KeyState state = comm.state_of(entry, rule_);
    EXPECT_EQ(state.tensors.size(), expected.tensors.size());
    for (const auto& [name, tensor] : expected.tensors) {
      expect_close(state.tensors.at(name), tensor, 3e-6, name);
    }
    if (dtype != at::kBFloat16) {
      expect_close(entry.slices[0].value, value_of(store), 3e-6);
    } else {
      expect_equal(
          entry.slices[0].value, entry.slices[0].master.to(at::kBFloat16));
    }
  }
}

INSTANTIATE_TEST_SUITE_P(
    All,
    OptimizerRuleTest,
    ::testing::ValuesIn(rule_cases()),
    [](const auto& info) { return info.param.name; });

// What an earlier stream has touched is kept until a later one is done with it,
// state included.
TEST(OptimizerDeviceTest, StreamsKeepTheState) {
  testing::RecordingRuntime runtime;
  CommAten comm(CommAten::Home::kDevice, runtime);
  Entry entry(1, {{4}, at::kHalf, 4});
  comm.store(entry, at::ones(4, at::kHalf));
  comm.place(entry, at::empty(4, at::TensorOptions().device(at::kMeta)));
  const at::Tensor gradient = at::ones(4, at::kHalf);
  const Value value{Value::Form::kDense, &gradient};
  RuleStep step;
  step.rule = make_rule("test", "adam", {{"amsgrad", 1}});
  const Item item{&entry, value, {}, &step};
  runtime.stream = 1;
  comm.accumulate(item);
  comm.reduce_update(item);
  runtime.stream = 2;
  runtime.log.clear();
  comm.reduce_update(item);
  // The value, its master, what has accumulated, and three states.
  EXPECT_EQ(std::count(runtime.log.begin(), runtime.log.end(), "keep 2"), 6);
}

// --- State

// Counts what is allocated.
class CountingRuntime final : public Runtime {
 public:
  c10::Stream current_stream(c10::Device device) override {
    return default_runtime().current_stream(device);
  }
  void record(std::unique_ptr<RuntimeEvent>& event, c10::Stream stream)
      override {
    default_runtime().record(event, stream);
  }
  void wait(RuntimeEvent& event, c10::Stream stream) override {
    default_runtime().wait(event, stream);
  }
  void keep_until_done(const at::Tensor& tensor, c10::Stream stream) override {
    default_runtime().keep_until_done(tensor, stream);
  }
  at::Tensor allocate(
      c10::IntArrayRef sizes,
      c10::IntArrayRef strides,
      c10::ScalarType dtype,
      c10::Device device) override {
    TORCH_CHECK(num_left-- > 0, "no memory");
    auto result = default_runtime().allocate(sizes, strides, dtype, device);
    bytes += static_cast<int64_t>(result.nbytes());
    return result;
  }
  void copy(const at::Tensor& destination, const at::Tensor& source) override {
    default_runtime().copy(destination, source);
  }

  int64_t bytes = 0;
  int64_t num_left = 1 << 30;
};

TEST(OptimizerStateTest, IsMadeAtTheFirstStepAndOnce) {
  CountingRuntime runtime;
  const auto store = c10::make_intrusive<KVStore>("local", runtime);
  store->init({1, 2}, Tensors::one_each({at::zeros(100), at::zeros(100)}));
  store->set_optimizer(optimizer("adam", {}));
  runtime.bytes = 0;
  store->push(1, at::ones(100));
  EXPECT_EQ(runtime.bytes, 2 * 400); // of this key alone
  store->push(1, Tensors::replicas({at::ones(100), at::ones(100)}));
  EXPECT_EQ(runtime.bytes, 2 * 400);
  store->set_optimizer(optimizer("adam", {{"amsgrad", 1}}), true);
  EXPECT_EQ(runtime.bytes, 2 * 400);
  store->push(1, at::ones(100));
  EXPECT_EQ(runtime.bytes, 3 * 400);
  store->push(1, at::ones(100));
  EXPECT_EQ(runtime.bytes, 3 * 400);
  store->set_optimizer(optimizer("sgd", {}));
  store->push({1, 2}, Tensors::one_each({at::ones(100), at::ones(100)}));
  EXPECT_EQ(runtime.bytes, 3 * 400); // none
}

TEST(OptimizerStateTest, HalfPrecisionNeedsAMasterOnly) {
  CountingRuntime runtime;
  const auto store = c10::make_intrusive<KVStore>("local", runtime);
  store->init(1, at::zeros(100, at::kBFloat16));
  store->set_optimizer(optimizer("sgd", {}));
  runtime.bytes = 0;
  store->push(1, at::ones(100, at::kBFloat16));
  store->push(1, at::ones(100));
  EXPECT_EQ(runtime.bytes, 400);
}

TEST(OptimizerStateTest, SurvivesOtherNumbersAndNotAnotherOptimizer) {
  const auto store = store_with(at::zeros(3), optimizer("adam", {{"lr", 0.1}}));
  Plain plain(at::zeros(3));
  RuleSpec rule = make_rule("test", "adam", {{"lr", 0.1}});
  const auto push = [&](double g) {
    store->push(1, at::full(3, g));
    plain.step(rule, at::full(3, g));
  };
  push(1);
  push(2);
  rule = make_rule("test", "adam", {{"lr", 0.01}, {"weight_decay", 0.1}});
  store->set_optimizer(optimizer(rule), /*keep_state=*/true);
  EXPECT_EQ(state_of(store).step, 2);
  push(-3);
  expect_close(value_of(store), plain.like(at::zeros(3)), 1e-6);
  EXPECT_EQ(state_of(store).step, 3);

  store->set_optimizer(optimizer(rule));
  EXPECT_EQ(state_of(store).step, 0);
  EXPECT_EQ(bytes_of(state_of(store)), 0);
  Plain anew(value_of(store));
  store->push(1, at::ones(3));
  anew.step(rule, at::ones(3));
  expect_close(value_of(store), anew.like(at::zeros(3)), 1e-6);
  EXPECT_EQ(state_of(store).step, 1);
}

TEST(OptimizerStateTest, AMasterOfAnotherOptimizerIsForgotten) {
  const auto store =
      store_with(at::ones(3, at::kHalf), optimizer("sgd", {{"lr", 1e-5}}));
  store->push(1, at::ones(3, at::kHalf)); // too little to be seen
  store->set_updater(nullptr);
  store->push(1, at::full(3, 5, at::kHalf));
  store->set_optimizer(optimizer("sgd", {{"lr", 1}}));
  store->push(1, at::ones(3, at::kHalf));
  expect_equal(value_of(store), at::full(3, 4, at::kHalf));
}

TEST(OptimizerStateTest, OptionsSwitchedOnLive) {
  struct Switch {
    const char* rule;
    const char* option;
    double value;
    const char* state;
  };
  for (const auto& [rule, option, value, state] :
       {Switch{"adam", "amsgrad", 1, "max_exp_avg_sq"},
        Switch{"rmsprop", "centered", 1, "grad_avg"},
        Switch{"rmsprop", "momentum", 0.9, "momentum_buffer"},
        Switch{"sgd", "momentum", 0.9, "momentum_buffer"}}) {
    SCOPED_TRACE(std::string(rule) + ' ' + option);
    const auto store =
        store_with(at::zeros(3, at::kDouble), optimizer(rule, {{"lr", 0.1}}));
    store->push(1, at::ones(3));
    store->push(1, at::ones(3));
    EXPECT_EQ(state_of(store).tensors.count(state), 0);
    store->set_optimizer(
        optimizer(rule, {{"lr", 0.1}, {option, value}}), /*keep_state=*/true);
    // Between the switch and the next step, a store can be saved.
    const auto copy = KVStore::from_state(store->state());
    expect_same_state(state_of(copy), state_of(store));
    for (const auto& each : {store, copy}) {
      each->push(1, at::full(3, 2.));
      EXPECT_EQ(state_of(each).tensors.count(state), 1);
      EXPECT_EQ(state_of(each).step, 3);
    }
    expect_equal(value_of(copy), value_of(store));
    store->set_optimizer(optimizer(rule, {{"lr", 0.1}}), /*keep_state=*/true);
    EXPECT_EQ(state_of(store).tensors.count(state), 0);
  }
}

TEST(OptimizerStateTest, AMomentumSwitchedOnLiveBeginsWithItsFirstGradient) {
  const auto store =
      store_with(at::zeros(2, at::kDouble), optimizer("sgd", {{"lr", 1}}));
  store->push(1, at::ones(2));
  store->set_optimizer(
      optimizer("sgd", {{"lr", 1}, {"momentum", 0.5}, {"dampening", 0.5}}),
      /*keep_state=*/true);
  store->push(1, at::full(2, 4.)); // the buffer is 4, not dampened
  expect_equal(value_of(store), at::full(2, -5., at::kDouble));
  store->push(1, at::full(2, 2.)); // 0.5 * 4 + 0.5 * 2
  expect_equal(value_of(store), at::full(2, -8., at::kDouble));
}

TEST(OptimizerStateTest, KeepingTheStateNeedsTheSameRule) {
  const auto store = c10::make_intrusive<KVStore>();
  const auto keep = [&] {
    store->set_optimizer(optimizer("adam", {}), /*keep_state=*/true);
  };
  EXPECT_TRUE(has(error_text(keep), "no optimizer is set"));
  store->set_optimizer(optimizer("sgd", {}));
  EXPECT_TRUE(has(error_text(keep), "got 'adam' where 'sgd' is"));
  store->set_optimizer(optimizer("adam", {}));
  EXPECT_EQ(error_text(keep), "no error");
}

TEST(OptimizerStateTest, CopiesShareNothingWithTheStore) {
  const auto store = store_with(at::zeros(3), optimizer("lion", {{"lr", 1}}));
  store->push(1, at::ones(3));
  auto state = state_of(store);
  state.tensors.at("exp_avg").fill_(-100);
  store->push(1, at::ones(3));
  expect_equal(value_of(store), at::full(3, -2.));
  store->set_optimizer_states(1, {state});
  state.tensors.at("exp_avg").fill_(100);
  store->push(1, at::ones(3));
  expect_equal(value_of(store), at::full(3, -1.));
}

TEST(OptimizerStateTest, RefusedStatesChangeNothing) {
  const auto store = store_with(at::zeros(3), optimizer("adam", {}));
  store->init(2, at::zeros(3));
  const Keys both{1, 2};
  const auto push = [&] {
    store->push(both, Tensors::one_each({at::ones(3), at::ones(3)}));
  };
  push();
  const auto before = store->optimizer_states(both);
  const at::Tensor good = at::ones(3);
  const std::vector<std::pair<KeyState, const char*>> bad{
      {{-1, 0, {{"exp_avg", good}, {"exp_avg_sq", good}}}, "step -1"},
      {{1, -1, {{"exp_avg", good}, {"exp_avg_sq", good}}}, "count -1"},
      {{1, 1, {{"exp_avg", good}, {"exp_avg_sq", good}}}, "count 1"},
      {{1, 0, {{"exp_avg", good}, {"exp_avg_sq", good}, {"accumulated", good}}},
       "count 0"},
      {{1, 0, {{"exp_avg", good}}}, "'exp_avg_sq', but got none"},
      {{1, 0, {{"sum", good}}}, "but got 'sum'"},
      {{1, 0, {{"exp_avg", good}, {"exp_avg_sq", good}, {"master", good}}},
       "but got 'master'"}, // the value is that itself
      {{1, 0, {{"exp_avg", at::ones(4)}, {"exp_avg_sq", good}}},
       "expected shape [3], but got [4]"},
      {{1,
        0,
        {{"exp_avg", at::ones(3, at::kComplexFloat)}, {"exp_avg_sq", good}}},
       "torch.complex64"}};
  for (const auto& [state, text] : bad) {
    const auto actual = error_text([&, &state = state] {
      store->set_optimizer_states(both, {before[0], state});
    });
    EXPECT_TRUE(has(actual, text)) << actual << "\nexpected: " << text;
    EXPECT_TRUE(has(actual, "set_optimizer_states")) << actual;
  }
  EXPECT_TRUE(
      has(error_text([&] { store->set_optimizer_states(both, {before[0]}); }),
          "2 states, one for each key, but got 1"));
  EXPECT_THROW(
      store->set_optimizer_states({1, 3}, {before[0], before[1]}),
      UnknownKeyError);
  EXPECT_THROW(
      store->set_optimizer_states(
          1, {{1, 0, {{"exp_avg", at::Tensor()}, {"exp_avg_sq", good}}}}),
      c10::TypeError);
  for (int64_t key : {1, 2}) {
    expect_same_state(state_of(store, key), before[key - 1]);
  }
}

// A state that does not fit into memory leaves what was there.
TEST(OptimizerStateTest, NoMemoryForAStateChangesNothing) {
  CountingRuntime runtime;
  const auto store = c10::make_intrusive<KVStore>("local", runtime);
  store->init(1, at::zeros(3));
  store->set_optimizer(optimizer("adam", {}));
  store->push(1, at::ones(3));
  const auto before = state_of(store);
  KeyState other{9, 0, {{"exp_avg", at::ones(3)}, {"exp_avg_sq", at::ones(3)}}};
  runtime.num_left = 1;
  EXPECT_THROW(store->set_optimizer_states(1, {other}), c10::Error);
  runtime.num_left = 1 << 30;
  expect_same_state(state_of(store), before);
}

// The first step fails for the second key's state; then there is memory again.
TEST(OptimizerStateTest, AStepThatFoundNoMemoryCanBeRepeated) {
  CountingRuntime runtime;
  const auto store = c10::make_intrusive<KVStore>("local", runtime);
  const Keys keys{1, 2};
  store->init(keys, Tensors::one_each({at::zeros(3), at::zeros(3)}));
  store->set_optimizer(
      optimizer("sgd", {{"lr", 1}, {"momentum", 0.5}, {"dampening", 0.5}}));
  const auto gradients = Tensors::one_each({at::ones(3), at::ones(3)});
  runtime.num_left = 1;
  EXPECT_THROW(store->push(keys, gradients), c10::Error);
  runtime.num_left = 1 << 30;
  expect_equal(value_of(store, 1), at::zeros(3));
  store->push(keys, gradients);
  expect_equal(value_of(store, 1), at::full(3, -1.));
  expect_equal(value_of(store, 2), at::full(3, -1.));
}

TEST(OptimizerStateTest, NeedsAnOptimizerAndAnOpenStore) {
  const auto store = c10::make_intrusive<KVStore>();
  store->init(1, at::zeros(3));
  EXPECT_TRUE(
      has(error_text([&] { store->optimizer_states(1); }), "one without"));
  EXPECT_TRUE(has(
      error_text([&] { store->set_optimizer_states(1, {}); }), "one without"));
  store->set_optimizer(optimizer("sgd", {}));
  store->close();
  for (const std::string& text :
       {error_text([&] { store->optimizer_states(1); }),
        error_text([&] { store->set_optimizer_states(1, {{}}); }),
        error_text([&] { store->num_skipped(); }),
        error_text([&] { store->set_optimizer(optimizer("sgd", {})); })}) {
    EXPECT_TRUE(has(text, "close")) << text;
  }
}

TEST(OptimizerStateTest, GroupsAndMultipliersInAStateAndBack) {
  Optimizer groups = optimizer("sgd", {{"lr", 1}}, {{"rescale_grad", 0.5}});
  groups.groups.push_back(make_rule("test", "sgd", {{"lr", 4}}));
  groups.keys[2] = {1, 0.5, 1};
  groups.keys["other"] = {0, 3, 2}; // of the other kind
  groups.keys[3] = {1, 1, 1};
  const auto store = c10::make_intrusive<KVStore>("device");
  const Keys keys{1, 2, 3};
  const auto each = [](double number) {
    return Tensors::one_each(std::vector<at::Tensor>(3, at::full(2, number)));
  };
  store->init(keys, each(0));
  store->set_optimizer(groups);
  const auto copy =
      KVStore::from_state(StoreState::from_tuple(store->state().to_tuple()));
  for (const auto& one : {store, copy}) {
    one->push(keys, each(2));
    expect_equal(value_of(one, 1), at::full(2, -1.));
    expect_equal(value_of(one, 2), at::full(2, -2.));
    expect_equal(value_of(one, 3), at::full(2, -4.));
  }
  const auto again = copy->state().optimizer;
  EXPECT_EQ(again->keys.at("other").lr_mult, 3);
  EXPECT_EQ(again->keys.at("other").wd_mult, 2);
}

TEST(OptimizerStateTest, PartsThatDoNotFitAreRefused) {
  const auto store = store_with(at::zeros(3), optimizer("adam", {}));
  store->push(1, at::ones(3));
  const auto refused = [&](auto change) {
    auto tuple = store->state().to_tuple();
    change(std::get<8>(tuple));
    return has(
        error_text([&] {
          KVStore::from_state(StoreState::from_tuple(std::move(tuple)));
        }),
        ": expected");
  };
  EXPECT_FALSE(refused([](auto&) {}));
  EXPECT_TRUE(refused([](auto& t) { std::get<0>(t) = "nadam"; }));
  EXPECT_TRUE(refused([](auto& t) { std::get<1>(t).clear(); }));
  EXPECT_TRUE(
      refused([](auto& t) { std::get<1>(t)[0].insert_or_assign("lr", -1); }));
  EXPECT_TRUE(refused([](auto& t) { std::get<2>(t).insert("clip", 1); }));
  EXPECT_TRUE(refused([](auto& t) { std::get<3>(t).push_back(1); }));
  EXPECT_TRUE(refused([](auto& t) {
    std::get<3>(t).push_back(1);
    std::get<5>(t).push_back(-1); // no group
    std::get<6>(t) = {1, 1};
  }));
  EXPECT_TRUE(refused([](auto& t) { std::get<7>(t).push_back(1); }));
  EXPECT_TRUE(refused([](auto& t) { std::get<8>(t).clear(); }));
  EXPECT_TRUE(refused([](auto& t) { std::get<9>(t).clear(); }));
  EXPECT_TRUE(
      refused([](auto& t) { (void)std::get<9>(t)[0].erase("exp_avg"); }));
}

// --- What happens to gradients before

TEST(GradientTest, NumbersThereAndBackAndErrors) {
  const NumbersByName numbers{
      {"accumulate", 3},
      {"rescale_grad", -0.5},
      {"clip_value", 2},
      {"max_norm", 4},
      {"skip_nonfinite", 1}};
  EXPECT_EQ(numbers_of(make_gradient("test", numbers)), numbers);
  const auto refusal = [](const NumbersByName& gradient) {
    return error_text([&] {
      c10::make_intrusive<KVStore>()->set_optimizer(
          optimizer("sgd", {}, gradient));
    });
  };
  EXPECT_EQ(refusal(numbers), "no error");
  EXPECT_TRUE(has(refusal({{"clip", 1}}), "but got 'clip'"));
  for (const double count :
       {0., -1., 2.5, 1e300, double(NAN), double(INFINITY)}) {
    EXPECT_TRUE(has(refusal({{"accumulate", count}}), "accumulate")) << count;
  }
  for (const char* name : {"rescale_grad", "clip_value", "max_norm"}) {
    EXPECT_TRUE(has(refusal({{name, NAN}}), name));
    EXPECT_TRUE(has(refusal({{name, INFINITY}}), name));
  }
  EXPECT_TRUE(has(refusal({{"clip_value", -1}}), "clip_value"));
  EXPECT_TRUE(has(refusal({{"max_norm", -1}}), "max_norm"));
}

TEST(GradientTest, GroupsAndMultipliersAreChecked) {
  const auto refusal = [](const Optimizer& optimizer) {
    return error_text(
        [&] { c10::make_intrusive<KVStore>()->set_optimizer(optimizer); });
  };
  EXPECT_TRUE(has(refusal({}), "at least one parameter group"));
  Optimizer bad = optimizer("sgd", {});
  bad.keys[5] = {1, 1, 1};
  EXPECT_TRUE(has(refusal(bad), "a group less than 1, but got 1 (key 5)"));
  for (const double number : {-1., double(NAN), double(INFINITY)}) {
    bad.keys[5] = {0, number, 1};
    EXPECT_TRUE(has(refusal(bad), "(key 5)"));
    bad.keys[5] = {0, 1, number};
    EXPECT_TRUE(has(refusal(bad), "(key 5)"));
  }
}

TEST(GradientTest, IntegersAreRefused) {
  const auto store = store_with(at::zeros(3, at::kInt), optimizer("adam", {}));
  EXPECT_THROW(store->push(1, at::ones(3, at::kInt)), c10::TypeError);
  expect_equal(value_of(store), at::zeros(3, at::kInt));
  // Such keys may be beside others, also in a copy.
  store->init(2, at::zeros(3, at::kUInt16));
  store->init(3, at::zeros(3));
  store->push(3, at::ones(3));
  const auto copy = KVStore::from_state(store->state());
  expect_same_state(state_of(copy, 3), state_of(store, 3));
  EXPECT_THROW(
      store->set_optimizer_states(
          2, {{1, 0, {{"exp_avg", at::ones(3)}, {"exp_avg_sq", at::ones(3)}}}}),
      c10::TypeError);
}

TEST(GradientTest, RescaledThenClipped) {
  const auto store = store_with(
      at::zeros(4),
      optimizer(
          "sgd", {{"lr", 1}}, {{"rescale_grad", 0.5}, {"clip_value", 1}}));
  store->push(1, at::tensor({1.F, 8.F, -8.F, -INFINITY}));
  expect_equal(value_of(store), at::tensor({-0.5F, -1.F, 1.F, 1.F}));
}

TEST(GradientTest, AccumulatedPushesMakeOneStep) {
  for (const auto dtype : {at::kFloat, at::kBFloat16, at::kComplexFloat}) {
    const at::Tensor value = at::ones({65, 17}, dtype);
    const RuleSpec rule = make_rule("test", "adam", {{"lr", 0.1}});
    const auto store = store_with(value, optimizer(rule, {{"accumulate", 3}}));
    Plain plain(value);
    for (int t = 0; t < 2; ++t) {
      const at::Tensor before = value_of(store);
      // One as the value lies, one across it, and two replicas.
      const at::Tensor a = at::ones({65, 17}, dtype);
      const at::Tensor b = at::full({17, 65}, 2, dtype).t();
      const at::Tensor c = at::full({65, 17}, -5 - t, dtype);
      store->push(1, a);
      EXPECT_EQ(state_of(store).num_accumulated, 1);
      store->push(1, b);
      expect_equal(value_of(store), before);
      const KeyState state = state_of(store);
      EXPECT_EQ(state.step, t);
      EXPECT_EQ(state.num_accumulated, 2);
      expect_equal(
          state.tensors.at("accumulated"),
          at::full({65, 17}, 3, at::toOpMathType(dtype)));
      // In a copy of the store, they are there, too.
      const auto copy = KVStore::from_state(store->state());
      expect_same_state(state_of(copy), state);
      for (const auto& each : {store, copy}) {
        each->push(1, Tensors::replicas({c, c}));
      }
      expect_equal(value_of(copy), value_of(store));
      plain.step(rule, a + b + c + c);
      EXPECT_EQ(state_of(store).step, t + 1);
      EXPECT_EQ(state_of(store).num_accumulated, 0);
      EXPECT_EQ(state_of(store).tensors.count("accumulated"), 0);
      expect_close(
          value_of(store),
          plain.like(value),
          dtype == at::kBFloat16 ? 1e-2 : 1e-5);
    }
    EXPECT_EQ(store->state().versions, (std::vector<int64_t>{2}));
  }
}

TEST(GradientTest, MaxNormIsThatOfAllKeysTogether) {
  for (const double max_norm : {1., 1e6}) {
    const auto store = c10::make_intrusive<KVStore>();
    const Keys keys{1, 2, 3};
    const std::vector<at::Tensor> gradients{
        at::randn({40000}),
        at::randn({65, 17}).t(),
        at::randn({30}, at::kComplexDouble)};
    store->init(
        keys,
        Tensors::one_each(
            {at::zeros({40000}),
             at::zeros({17, 65}),
             at::zeros({30}, at::kComplexDouble)}));
    store->set_optimizer(
        optimizer("sgd", {{"lr", 1}}, {{"max_norm", max_norm}}));
    double norm = 0;
    for (const auto& gradient : gradients) {
      for (const double number : Plain::numbers_of(gradient)) {
        norm += number * number;
      }
    }
    norm = std::sqrt(norm);
    store->push(keys, Tensors::one_each(gradients));
    const double scale = std::min(1., max_norm / (norm + 1e-6));
    for (int64_t key : {1, 2, 3}) {
      expect_close(value_of(store, key), gradients[key - 1].mul(-scale), 1e-6);
    }
  }
}

TEST(GradientTest, MaxNormOfAccumulatedAndClippedGradients) {
  const auto store = store_with(
      at::zeros(2, at::kDouble),
      optimizer(
          "sgd",
          {{"lr", 1}},
          {{"accumulate", 2},
           {"rescale_grad", 0.5},
           {"clip_value", 3},
           {"max_norm", 1}}));
  store->push(1, at::tensor({6., 50.}));
  store->push(1, at::tensor({0., 50.}));
  const double norm = std::sqrt(18.); // of (3, 3), which (3, 50) became
  const double expected = -3 / (norm + 1e-6);
  expect_close(value_of(store), at::full(2, expected, at::kDouble), 1e-12);
}

TEST(GradientTest, ACallThatIsNotFiniteIsNoStep) {
  const auto store = c10::make_intrusive<KVStore>();
  const Keys both{1, 2};
  const at::Tensor zero = at::zeros(3);
  store->init(both, Tensors::one_each({zero, zero}));
  const NumbersByName options{
      {"skip_nonfinite", 1}, {"clip_value", 1}, {"accumulate", 2}};
  store->set_optimizer(optimizer("sgd", {{"lr", 1}}, options));
  const auto push = [&](double a, double b) {
    store->push(both, Tensors::one_each({at::full(3, a), at::full(3, b)}));
  };
  EXPECT_EQ(store->num_skipped(), 0);
  for (const double bad : {double(NAN), double(INFINITY), -double(INFINITY)}) {
    push(1, 1);
    push(0, bad);
  }
  EXPECT_EQ(store->num_skipped(), 3);
  for (int64_t key : {1, 2}) {
    expect_equal(value_of(store, key), zero);
    EXPECT_EQ(state_of(store, key).step, 0);
    EXPECT_EQ(state_of(store, key).num_accumulated, 0); // is gone
  }
  EXPECT_EQ(store->state().versions, (std::vector<int64_t>{0, 0}));
  push(0.25, 0.5);
  push(0.25, 0.5);
  expect_equal(value_of(store, 1), at::full(3, -0.5));
  expect_equal(value_of(store, 2), at::full(3, -1.));
  EXPECT_EQ(store->num_skipped(), 3);
}

TEST(GradientTest, WithoutIfANaNGoesIntoTheValue) {
  const auto store = store_with(
      at::zeros(2), optimizer("sgd", {{"lr", 1}}, {{"max_norm", 1}}));
  store->push(1, at::tensor({NAN, 1.F}));
  EXPECT_TRUE(at::isnan(value_of(store)).all().item<bool>());
  EXPECT_EQ(store->num_skipped(), 0);
}

TEST(GradientTest, AnInfiniteWeightStaysWithoutDecay) {
  for (const auto& [name, rule] : rule_cases()) {
    if (rule.weight_decay == 0 && rule.id != RuleSpec::Id::kLamb) {
      const auto store = store_with(at::full(3, INFINITY), optimizer(rule));
      store->push(1, at::ones(3));
      expect_equal(value_of(store), at::full(3, INFINITY));
    }
  }
}

TEST(GradientTest, UnsignedIntegersWithoutAnOptimizer) {
  for (const auto dtype : {at::kUInt16, at::kUInt32, at::kUInt64}) {
    const auto store = c10::make_intrusive<KVStore>();
    const at::Tensor value = at::ones(300000, at::kInt).to(dtype);
    store->init(1, value);
    store->push(1, Tensors::replicas({value, value}));
    expect_equal(value_of(store).to(at::kLong), at::full(300000, 2, at::kLong));
  }
}

// --- Threads

// Each push makes one step of each of its keys, whatever others do.
TEST(OptimizerThreadsTest, PushesSettingsAndStatesAtOnce) {
  constexpr int kThreads = 3;
  constexpr int kPushes = 200;
  constexpr int64_t kKeys = 20;
  const auto store = c10::make_intrusive<KVStore>();
  Keys keys;
  keys.single = false;
  for (int64_t key = 0; key < kKeys; ++key) {
    keys.list.emplace_back(key);
  }
  const auto repeat = [](const at::Tensor& tensor) {
    return Tensors::one_each(std::vector<at::Tensor>(kKeys, tensor));
  };
  store->init(keys, repeat(at::zeros(5)));
  const auto counting = [](double momentum) {
    return optimizer("sgd", {{"lr", 1}, {"weight_decay", momentum}});
  };
  store->set_optimizer(counting(0));
  std::vector<std::thread> threads;
  std::atomic<int> running{kThreads};
  for (int t = 0; t < kThreads; ++t) {
    threads.emplace_back([&] {
      for (int i = 0; i < kPushes; ++i) {
        store->push(keys, repeat(at::full(5, -1.)));
      }
      --running;
    });
  }
  threads.emplace_back([&] {
    while (running > 0) {
      store->set_optimizer(counting(0), /*keep_state=*/true);
    }
  });
  int64_t last = 0;
  while (running > 0) {
    const auto states = store->optimizer_states(keys);
    EXPECT_GE(states[0].step, last);
    last = states[0].step;
  }
  for (auto& thread : threads) {
    thread.join();
  }
  for (int64_t key = 0; key < kKeys; ++key) {
    EXPECT_EQ(state_of(store, key).step, kThreads * kPushes);
    expect_equal(
        value_of(store, key), at::full(5, kThreads * kPushes, at::kFloat));
  }
}

} // namespace
} // namespace torchkv
