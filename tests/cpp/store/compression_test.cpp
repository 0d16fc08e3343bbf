// Which codec a key has, and stores that compress, in C++.
#include "store/compression.h"

#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "error_text.h"
#include "kvstore.h"
#include "store/store.h"

namespace torchkv {
namespace {

using testing::error_text;

Codec codec(const char* name, const NumbersByName& numbers = {}) {
  return make_codec("op", name, numbers);
}

TEST(CompressionTest, CodecsByKey) {
  Compression compression{{codec("2bit"), codec("fp16")}, {}};
  compression.keys[Key("b")] = 1;
  EXPECT_STREQ(name_of(compression.codec_of("a")), "2bit");
  EXPECT_STREQ(name_of(compression.codec_of("b")), "fp16");
  EXPECT_FALSE(compression.is_none());
  EXPECT_TRUE((Compression{{codec("none")}, {}}).is_none());
}

TEST(CompressionTest, RefusesGroupsThatDoNotExist) {
  Compression compression{{codec("2bit")}, {}};
  compression.keys[Key(3)] = 1;
  EXPECT_EQ(
      error_text([&] { check_compression("op", compression); }),
      "op: expected a group less than 1, but got 1 (key 3)");
  EXPECT_NE(error_text([] { check_compression("op", {}); }), "no error");
}

TEST(CompressionTest, AStoreCompresses) {
  KVStore store("device");
  store.init("w", at::zeros({4}));
  EXPECT_TRUE(store.gradient_compression().groups.empty());
  store.set_gradient_compression("2bit", {{"threshold", 0.5}});
  EXPECT_STREQ(name_of(store.gradient_compression().groups.at(0)), "2bit");
  const at::Tensor value = at::full({4}, 0.375);
  store.push("w", Tensors::replicas({value, value}));
  EXPECT_TRUE(store.pull("w")[0].equal(at::zeros({4})));
  store.push("w", Tensors::replicas({value, value}));
  EXPECT_TRUE(store.pull("w")[0].equal(at::ones({4})));

  const auto copy = KVStore::from_state(store.state());
  for (KVStore* each : {&store, copy.get()}) {
    each->push("w", Tensors::replicas({value, value}));
    EXPECT_TRUE(each->pull("w")[0].equal(at::ones({4})));
  }
  store.set_gradient_compression("none");
  EXPECT_TRUE(store.gradient_compression().groups.empty());
}

TEST(CompressionTest, AnAsynchronousPush) {
  KVStore store("device");
  store.init("w", at::zeros({4}));
  store.set_gradient_compression("1bit", {{"threshold", 0}});
  CallOptions options;
  options.async_op = true;
  store.push("w", at::full({4}, 3.0), options)->wait();
  EXPECT_TRUE(store.pull("w")[0].equal(at::ones({4})));
}

TEST(CompressionTest, LocalRefusesIt) {
  KVStore store("local");
  EXPECT_NE(
      error_text([&] {
        store.set_gradient_compression("2bit");
      }).find("but got 'local'"),
      std::string::npos);
  store.set_gradient_compression("none");
}

TEST(CompressionTest, AnUnknownKeyOfAGroup) {
  KVStore store("device");
  store.init("weight", at::zeros({4}));
  Compression compression{{codec("2bit"), codec("fp16")}, {}};
  compression.keys[Key("wieght")] = 1;
  const std::string text = error_text<UnknownKeyError>(
      [&] { store.set_gradient_compression(compression); });
  EXPECT_NE(text.find("did you mean 'weight'"), std::string::npos) << text;
}

} // namespace
} // namespace torchkv
