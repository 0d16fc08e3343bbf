// The store in CUDA graphs: replays match calls, and all work is ordered.
#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <memory>
#include <optional>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "broken_runtime.h"
#include "devices_test.h"
#include "graph.h"
#include "kvstore.h"
#include "rule_cases.h"
#include "stores.h"

namespace torchkv {
namespace {

using mock_cuda::begin_capture;
using mock_cuda::BrokenRuntime;
using mock_cuda::counters;
using mock_cuda::cuda;
using mock_cuda::current_stream;
using mock_cuda::end_capture;
using mock_cuda::Graph;
using mock_cuda::new_stream;
using mock_cuda::order;
using mock_cuda::refusal;

constexpr int kNumKeys = 3;

Keys all_keys() {
  return mock_cuda::first_keys(kNumKeys);
}

// A store on one device, with two gradients and an out for each key. Does not
// block the host, which would order all streams.
struct Model {
  explicit Model(c10::ScalarType dtype, Runtime& runtime = default_runtime())
      : store(c10::make_intrusive<KVStore>("device", runtime)) {
    const auto options = at::device(cuda(0)).dtype(dtype);
    Tensors values;
    for (int64_t size : {1000, 7, 3}) {
      values.append(at::full(size, 0.5, options));
      values.end_group();
      gradients.append(at::zeros(size, options));
      gradients.append(at::zeros(size, options));
      gradients.end_group();
      outs.append(at::zeros(size, options));
      outs.end_group();
    }
    store->init(all_keys(), values);
  }

  // New contents for the same memory, and outs that must be overwritten.
  void change(int seed) const {
    double first = seed;
    for (const auto& gradient : gradients.flat) {
      first += 0.37;
      gradient.copy_(
          at::linspace(-first, 2, gradient.numel(), at::device(cuda(0))));
    }
    for (const auto& out : outs.flat) {
      out.fill_(99);
    }
  }
  void push() const {
    store->push(all_keys(), gradients);
  }
  void step() const {
    push();
    store->pull(all_keys(), outs);
  }

  c10::intrusive_ptr<KVStore> store;
  Tensors gradients;
  Tensors outs;
};

void expect_same(
    c10::ArrayRef<at::Tensor> found,
    c10::ArrayRef<at::Tensor> expected) {
  ASSERT_EQ(found.size(), expected.size());
  for (size_t i = 0; i < found.size(); ++i) {
    EXPECT_EQ((found[i] != expected[i]).sum().item<int64_t>(), 0)
        << "in key " << i;
  }
}

// As with torch.cuda.graph: on a stream that has waited for the current one.
template <class Call>
std::unique_ptr<Graph> captured(Call call) {
  const c10::Stream stream = new_stream(cuda(0));
  order(current_stream(cuda(0)), stream);
  const c10::StreamGuard guard(stream);
  begin_capture(stream);
  const std::string said = refusal(call);
  std::unique_ptr<Graph> graph;
  EXPECT_EQ(refusal([&] { graph = end_capture(stream); }), "");
  EXPECT_EQ(said, "");
  TORCH_CHECK(graph != nullptr); // the rest of the test needs it
  return graph;
}

// The error of the call in a capture.
template <class Call>
std::string mistake(Call call) {
  const c10::StreamGuard guard(new_stream(cuda(0)));
  const c10::Stream stream = current_stream(cuda(0));
  begin_capture(stream);
  std::string said = refusal(call);
  EXPECT_NE(refusal([&] { end_capture(stream); }), "");
  return said;
}

// Two models side by side, of which one is captured.
class Pair {
 public:
  explicit Pair(c10::ScalarType dtype) : captured_(dtype), eager_(dtype) {}

  template <class Set>
  void set_up(Set set) const {
    set(*captured_.store);
    set(*eager_.store);
  }
  std::unique_ptr<Graph> capture() const {
    counters() = {};
    return captured([&] { captured_.step(); });
  }
  // Expects a step of each on the same contents to have the same results.
  void compare_calls() {
    compare([&] { captured_.step(); });
  }
  void compare_replay(Graph& graph) {
    compare([&] { graph.replay(current_stream(cuda(0))); });
  }

  KVStore& eager_store() const {
    return *eager_.store;
  }

 private:
  template <class Step>
  void compare(Step step) {
    ++seed_;
    captured_.change(seed_);
    eager_.change(seed_);
    step();
    eager_.step();
    expect_same(captured_.outs.flat, eager_.outs.flat);
    expect_same(
        captured_.store->pull(all_keys()), eager_.store->pull(all_keys()));
  }

  Model captured_;
  Model eager_;
  int seed_ = 0;
};

void set_sgd(KVStore& store, double lr, bool keep_state = false) {
  Optimizer optimizer;
  optimizer.groups.push_back(
      make_rule("test", "sgd", {{"lr", lr}, {"momentum", 0.5}}));
  store.set_optimizer(std::move(optimizer), keep_state);
}

// --- Replays match calls
// --------------------------------------------------------------------

class CaptureRuleTest : public mock_cuda::DevicesTest,
                        public ::testing::WithParamInterface<
                            std::tuple<testing::RuleCase, c10::ScalarType>> {
 protected:
  static const RuleSpec& rule() {
    return std::get<0>(GetParam()).rule;
  }
  // A graph repeats the captured step, so the other store must use the same
  // count if it is in the formula.
  void set_count(int64_t count) const {
    if (testing::has_step_count(rule())) {
      auto states = pair.eager_store().optimizer_states(all_keys());
      for (auto& state : states) {
        state.step = count;
      }
      pair.eager_store().set_optimizer_states(all_keys(), states);
    }
  }

  Pair pair{std::get<1>(GetParam())};
};

TEST_P(CaptureRuleTest, ReplaysMatchCalls) {
  pair.set_up([&](KVStore& store) {
    Optimizer optimizer;
    optimizer.groups.push_back(rule());
    store.set_optimizer(std::move(optimizer));
  });
  pair.compare_calls();
  pair.compare_calls();
  const auto graph = pair.capture();
  if (!is_row_wise(rule())) { // others have no kernel
    const bool norms = has_norms(rule());
    EXPECT_EQ(counters().launches, norms ? 4 : 2);
    EXPECT_EQ(counters().operators, 0);
    EXPECT_EQ(counters().allocations, norms ? 1 : 0);
  }
  for (int i = 0; i < 3; ++i) {
    set_count(2);
    pair.compare_replay(*graph);
  }
  set_count(3); // the captured call has counted, its replays have not
  pair.compare_calls();
}

INSTANTIATE_TEST_SUITE_P(
    Rules,
    CaptureRuleTest,
    ::testing::Combine(
        ::testing::ValuesIn(testing::rule_cases()),
        ::testing::Values(at::kFloat, at::kHalf)));

using CaptureTest = mock_cuda::DevicesTest;

TEST_F(CaptureTest, AssignedSums) {
  for (const auto dtype : {at::kFloat, at::kHalf, at::kLong}) {
    Pair pair(dtype);
    pair.compare_calls();
    const auto graph = pair.capture();
    EXPECT_EQ(counters().launches, 2);
    EXPECT_EQ(counters().allocations, 0);
    for (int i = 0; i < 3; ++i) {
      pair.compare_replay(*graph);
    }
    pair.compare_calls();
  }
}

// In several launches, whose parameters are small.
TEST_F(CaptureTest, ManyKeys) {
  constexpr int kMany = 300;
  const auto store = c10::make_intrusive<KVStore>("device");
  const Keys keys = mock_cuda::first_keys(kMany);
  Tensors values;
  for (int i = 0; i < kMany; ++i) {
    values.append(at::full({2}, 1.F, at::device(cuda(0))));
    values.end_group();
  }
  store->init(keys, values);
  Optimizer optimizer;
  optimizer.groups.push_back(make_rule("test", "sgd", {{"lr", 1}}));
  store->set_optimizer(optimizer);
  const auto step = [&] {
    store->push(keys, values);
    store->pull(keys, values);
  };
  step(); // 0
  const auto graph = captured(step);
  for (const auto& value : values.flat) {
    value.fill_(-1);
  }
  graph->replay(current_stream(cuda(0))); // 0 + 1
  graph->replay(current_stream(cuda(0))); // 1 - 1
  graph->replay(current_stream(cuda(0))); // 0 - 0
  values.flat[7].fill_(4);
  graph->replay(current_stream(cuda(0))); // 0 - 4
  EXPECT_EQ(values.flat[7].cpu()[0].item<float>(), -4);
  EXPECT_EQ(values.flat[kMany - 1].cpu()[0].item<float>(), 0);
}

TEST_F(CaptureTest, AnOpaqueUpdater) {
  Pair pair(at::kFloat);
  pair.set_up([](KVStore& store) {
    store.set_updater(std::make_shared<mock_cuda::AddTwice>());
  });
  pair.compare_calls();
  const auto graph = pair.capture();
  EXPECT_EQ(counters().allocations, kNumKeys); // the updater's
  for (int i = 0; i < 3; ++i) {
    pair.compare_replay(*graph);
  }
  pair.compare_calls();
}

// Their streams join the capture and then the captured stream.
TEST_F(CaptureTest, PlacesOfOneDevice) {
  const mock_cuda::PlacesOfEnvironment places("cuda:0,cuda:0");
  for (const bool has_state : {false, true}) {
    Pair pair(at::kFloat);
    if (has_state) {
      pair.set_up([](KVStore& store) { set_sgd(store, 0.25); });
    }
    pair.compare_calls();
    const auto graph = pair.capture();
    EXPECT_EQ(counters().launches, 4); // a launch of each place, each way
    EXPECT_EQ(counters().allocations, 0);
    for (int i = 0; i < 3; ++i) {
      pair.compare_replay(*graph);
    }
    pair.compare_calls();
  }
}

// Values that the kernels do not support. Temporaries belong to the graph, on
// the streams of places, too.
TEST_F(CaptureTest, PlacesWhoseValuesAreConverted) {
  const mock_cuda::PlacesOfEnvironment places("cuda:0,cuda:0");
  const auto store = c10::make_intrusive<KVStore>("device");
  std::vector<at::Tensor> values;
  for (int i = 0; i < 2; ++i) {
    values.push_back(at::ones({64}, at::device(cuda(0)).dtype(at::kDouble)));
  }
  store->init(1, at::zeros({64}, at::device(cuda(0)).dtype(at::kFloat)));
  Optimizer optimizer;
  optimizer.groups.push_back(make_rule("test", "sgd", {{"lr", 1}}));
  store->set_optimizer(optimizer);
  const auto push = [&] { store->push(1, Tensors::replicas(values)); };
  push();
  const auto graph = captured(push);
  for (int i = 1; i < 4; ++i) {
    at::full({100}, 5.F, at::device(cuda(0))); // reuses free memory
    graph->replay(current_stream(cuda(0)));
    EXPECT_TRUE(
        at::equal(store->pull(1)[0].cpu(), at::full({64}, -2.F * (i + 1))));
  }
}

TEST_F(CaptureTest, SumsByOperators) {
  const auto store = c10::make_intrusive<KVStore>("device");
  const at::Tensor value = at::zeros({2, 3}, at::device(cuda(0)));
  const at::Tensor across = at::zeros({3, 2}, at::device(cuda(0))).t();
  store->init(1, value);
  const auto step = [&] {
    store->push(1, Tensors::replicas({value, across}));
    store->pull(1, value);
  };
  step();
  const auto graph = captured(step);
  for (int i = 1; i < 4; ++i) {
    value.fill_(i);
    across.fill_(10 * i);
    graph->replay(current_stream(cuda(0)));
    EXPECT_TRUE(at::equal(value.cpu(), at::full({2, 3}, 11.0 * i)));
  }
}

TEST_F(CaptureTest, TheLearningRateIsThatOfTheCapture) {
  const Model model(at::kFloat);
  set_sgd(*model.store, 1);
  model.step();
  const auto graph = captured([&] { model.step(); });
  set_sgd(*model.store, 0, /*keep_state=*/true);
  model.change(1);
  model.step();
  const at::Tensor before = model.store->pull(1)[0].clone();
  model.step();
  EXPECT_TRUE(at::equal(model.store->pull(1)[0].cpu(), before.cpu()));
  graph->replay(current_stream(cuda(0)));
  EXPECT_FALSE(at::equal(model.store->pull(1)[0].cpu(), before.cpu()));
}

TEST_F(CaptureTest, ReadsByTheHostAreRejected) {
  const Model model(at::kFloat);
  Optimizer optimizer;
  optimizer.groups.push_back(make_rule("test", "sgd", {{"lr", 1}}));
  optimizer.gradient.max_norm = 1;
  model.store->set_optimizer(optimizer);
  model.step();
  EXPECT_EQ(
      mistake([&] { model.push(); }),
      "mock_cuda: cudaStreamSynchronize while a stream is captured");
}

// --- Order
// --------------------------------------------------------------------

// The caller orders a replay with work outside of the graph.
TEST_F(CaptureTest, AReplayIsOrderedByItsCaller) {
  const Model model(at::kFloat);
  set_sgd(*model.store, 1);
  model.step();
  const c10::Stream here = current_stream(cuda(0));
  const c10::Stream other = new_stream(cuda(0));
  counters() = {};
  const auto graph = captured([&] { model.step(); });
  EXPECT_EQ(counters().waits, 1); // by captured()
  EXPECT_NE(
      refusal([&] { graph->replay(other); }).find("nothing orders the two"),
      std::string::npos);
  order(here, other);
  EXPECT_EQ(refusal([&] { graph->replay(other); }), "");
  EXPECT_NE(
      refusal([&] { model.step(); }).find("nothing orders the two"),
      std::string::npos);
  order(other, here);
  EXPECT_EQ(refusal([&] { model.step(); }), "");
  order(here, other);
  const c10::StreamGuard guard(other); // the store waits again
  EXPECT_EQ(refusal([&] { model.push(); }), "");
  order(other, here);
}

// The capture may be on a stream that the store has used.
TEST_F(CaptureTest, CallsContinueOnTheStreamOfTheCapture) {
  const Model model(at::kFloat);
  set_sgd(*model.store, 1);
  const c10::Stream stream = new_stream(cuda(0));
  order(current_stream(cuda(0)), stream);
  std::unique_ptr<Graph> graph;
  {
    const c10::StreamGuard guard(stream);
    model.step();
    begin_capture(stream);
    model.step();
    graph = end_capture(stream);
    graph->replay(stream);
    EXPECT_EQ(refusal([&] { model.step(); }), "");
  }
  EXPECT_EQ(refusal([&] { model.push(); }), ""); // waits for that stream
  order(stream, current_stream(cuda(0)));
  EXPECT_EQ(refusal([&] { graph->replay(current_stream(cuda(0))); }), "");
}

TEST_F(CaptureTest, AWaitForWorkOutsideIsDetected) {
  BrokenRuntime runtime;
  const Model model(at::kFloat, runtime);
  model.step();
  runtime.sees_captures = false;
  EXPECT_NE(
      mistake([&] { model.step(); }).find("from outside of its capture"),
      std::string::npos);
}

// --- Several devices
// --------------------------------------------------------------------

TEST_F(CaptureTest, DevicesWhoseStreamsAreCaptured) {
  const auto store = c10::make_intrusive<KVStore>("device");
  std::vector<at::Tensor> values;
  for (int d : {0, 1, 1, 0}) { // of two keys, at home on 0 and on 1
    values.push_back(at::full(5, d, at::device(cuda(d)).dtype(at::kFloat)));
  }
  const Tensors tensors{{{values[0], values[1]}, {values[2], values[3]}}};
  store->init({1, 2}, Tensors::one_each({values[0], values[2]}));
  const auto step = [&] {
    store->push({1, 2}, tensors);
    store->pull({1, 2}, tensors);
  };
  step();
  const auto there = new_stream(cuda(1));
  order(current_stream(cuda(1)), there);
  const c10::StreamGuard guard(there);
  const auto graph = captured([&] {
    const c10::Stream here = current_stream(cuda(0));
    order(here, there);
    step();
    order(there, here);
  });
  captured([&] { // without the other stream
    EXPECT_NE(
        refusal(step).find("captured into one CUDA graph"), std::string::npos);
  });
  order(there, current_stream(cuda(0)));
  for (int i = 0; i < 2; ++i) { // 1, then doubled each time
    graph->replay(current_stream(cuda(0)));
  }
  for (const auto& value : values) {
    order(current_stream(cuda(0)), current_stream(value.device()));
    EXPECT_TRUE(at::equal(value.cpu(), at::full(5, 4.0)));
  }
}

// It would join unnoticed, and leave its events to later calls.
TEST_F(CaptureTest, AHomeWhoseStreamIsNotCaptured) {
  const auto store = c10::make_intrusive<KVStore>("device");
  const at::Tensor here = at::ones({5}, at::device(cuda(0)));
  const at::Tensor there = at::ones({5}, at::device(cuda(1)));
  const auto push = [&] { store->push(1, Tensors::replicas({here, there})); };
  store->init(1, there);
  push();
  set_sgd(*store, 0.25);
  const c10::Stream at_home = new_stream(cuda(1));
  order(current_stream(cuda(1)), at_home);
  {
    const c10::StreamGuard guard(at_home);
    captured([&] {
      EXPECT_NE(
          refusal(push).find("captured into one CUDA graph"),
          std::string::npos);
    });
  }
  EXPECT_TRUE(store->optimizer_states(1)[0].tensors.empty());
  EXPECT_EQ(refusal(push), "");
}

} // namespace
} // namespace torchkv
