// TorchScript updaters without Python: signatures, state, saving.
#include "update/script_updater.h"

#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <memory>
#include <string>

#include "kvstore.h"

namespace torchkv {
namespace {

torch::jit::Module make_module(const std::string& source) {
  torch::jit::Module module("Updater");
  module.define(source + "\n");
  return module;
}

// Momentum, with state in an attribute.
torch::jit::Module make_momentum() {
  torch::jit::Module module("Momentum");
  module.register_attribute(
      "m",
      c10::DictType::create(c10::IntType::get(), c10::TensorType::get()),
      c10::impl::GenericDict(c10::IntType::get(), c10::TensorType::get()));
  module.define(R"(
    def forward(self, key: int, input: Tensor, stored: Tensor):
        if key in self.m:
            self.m[key] = self.m[key] * 0.5 + input
        else:
            self.m[key] = input
        stored -= self.m[key]
  )");
  return module;
}

float value(const c10::intrusive_ptr<KVStore>& store, int64_t key) {
  return store->pull(key)[0][0].item<float>();
}

std::string refusal(const torch::jit::Module& module) {
  try {
    const ScriptUpdater updater(module);
  } catch (const c10::TypeError& error) {
    return error.what_without_backtrace();
  }
  return "no TypeError";
}

TEST(ScriptUpdaterTest, MayReturnTheStoredValueButNotANewTensor) {
  const auto store = c10::make_intrusive<KVStore>();
  store->init(1, at::zeros(2));
  const auto set = [&](const std::string& body) {
    store->set_updater(
        std::make_shared<ScriptUpdater>(make_module(
            "def forward(self, key: int, input: Tensor, stored: Tensor):\n"
            "    " +
            body)));
  };
  set("return stored.add_(input)");
  store->push(1, at::ones(2));
  EXPECT_EQ(value(store, 1), 1);
  set("return stored + input");
  EXPECT_THROW(store->push(1, at::ones(2)), c10::TypeError);
  EXPECT_EQ(value(store, 1), 1);
  set("return 2 * stored.add_(input)"); // written, so what it returns is
                                        // ignored
  store->push(1, at::ones(2));
  EXPECT_EQ(value(store, 1), 2);
}

TEST(ScriptUpdaterTest, KeepsStateAndSharesItWithTheModule) {
  const auto module = make_momentum();
  const auto store = c10::make_intrusive<KVStore>();
  store->init(1, at::zeros(2));
  store->set_updater(std::make_shared<ScriptUpdater>(module));
  store->push(1, at::full(2, 4.F));
  store->push(1, at::full(2, 4.F));
  EXPECT_EQ(value(store, 1), -10); // -4, then -(4 * 0.5 + 4)
  const auto state = module.attr("m").toGenericDict();
  EXPECT_EQ(state.at(1).toTensor()[0].item<float>(), 6);
}

// The module keeps the merge buffer of the first push.
TEST(ScriptUpdaterTest, WhatItKeepsIsNotOverwrittenByTheNextPush) {
  const auto module = make_momentum();
  const auto store = c10::make_intrusive<KVStore>();
  store->init(1, at::zeros(2));
  store->set_updater(std::make_shared<ScriptUpdater>(module));
  store->push(1, at::full(2, 4.F));
  const at::Tensor kept = module.attr("m").toGenericDict().at(1).toTensor();
  store->push(1, at::full(2, 100.F));
  EXPECT_EQ(kept[0].item<float>(), 4);
}

TEST(ScriptUpdaterTest, IsPartOfTheState) {
  const auto store = c10::make_intrusive<KVStore>();
  store->init(1, at::zeros(2));
  store->set_updater(std::make_shared<ScriptUpdater>(make_momentum()));
  store->push(1, at::full(2, 4.F));
  const auto copy = KVStore::from_state(store->state());
  store->push(1, at::full(2, 4.F));
  copy->push(1, at::full(2, 4.F));
  EXPECT_EQ(value(store, 1), -10);
  EXPECT_EQ(value(copy, 1), -10);
}

TEST(ScriptUpdaterTest, WrongSignaturesNameTheExpectedOne) {
  for (const auto* source : {
           "def forward(self, key: int, input: Tensor): pass",
           "def forward(self, key: float, input: Tensor, stored: Tensor): pass",
           "def forward(self, key: int, input: int, stored: Tensor): pass",
           "def forward(self, key: int, a: Tensor, b: Tensor, c: int): pass",
           "def step(self, key: int, input: Tensor, stored: Tensor): pass",
       }) {
    EXPECT_NE(
        refusal(make_module(source))
            .find("forward(key: int, input: Tensor, stored: Tensor)"),
        std::string::npos)
        << source;
  }
}

TEST(ScriptUpdaterTest, TakesOneKindOfKeysOrAny) {
  const auto kind = [](const std::string& key_type) {
    return ScriptUpdater(make_module(
                             "def forward(self, key: " + key_type +
                             ", input: Tensor, stored: Tensor): pass"))
        .key_kind();
  };
  EXPECT_EQ(kind("int"), KeyKind::kInt);
  EXPECT_EQ(kind("str"), KeyKind::kStr);
  EXPECT_EQ(kind("Any"), std::nullopt);
}

TEST(ScriptUpdaterTest, ItsKindOfKeysMustMatchTheStore) {
  const auto takes_str = std::make_shared<ScriptUpdater>(make_module(
      "def forward(self, key: str, input: Tensor, stored: Tensor): pass"));
  const auto store = c10::make_intrusive<KVStore>();
  store->set_updater(takes_str); // no keys yet
  EXPECT_THROW(store->init(1, at::zeros(2)), c10::TypeError);
  EXPECT_EQ(store->size(), 0);
  store->set_updater(nullptr);
  store->init(1, at::zeros(2));
  EXPECT_THROW(store->set_updater(takes_str), c10::TypeError);
}

TEST(ScriptUpdaterTest, LoadRejectsInvalidTensors) {
  EXPECT_THROW(ScriptUpdater::load(at::zeros(4)), c10::ValueError);
}

} // namespace
} // namespace torchkv
