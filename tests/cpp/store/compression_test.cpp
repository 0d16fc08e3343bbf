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

TEST(CompressionTest, ResidualsStayWhileThereIsErrorFeedback) {
  const auto make =
      [](const char* others, const char* of_b, const StoreCompression* before) {
        Compression compression{{codec(others), codec(of_b)}, {}};
        compression.keys[Key("b")] = 1;
        return StoreCompression(compression, before);
      };
  const auto first = make("2bit", "none", nullptr);
  EXPECT_EQ(first.since("a"), first.generation());
  const auto second = make("fp16", "fp8", &first);
  EXPECT_GT(second.generation(), first.generation());
  EXPECT_EQ(second.since("a"), first.generation());
  EXPECT_EQ(second.since("b"), second.generation());
  const auto third = make("int4", "topk", &second);
  EXPECT_EQ(third.since("a"), first.generation());
  EXPECT_EQ(third.since("b"), second.generation());
  // Of keys that are in no group any more, too.
  const StoreCompression fourth(Compression{{codec("2bit")}, {}}, &third);
  EXPECT_EQ(fourth.since("a"), fourth.generation());
  EXPECT_EQ(fourth.since("b"), second.generation());
  const StoreCompression fifth(Compression{{codec("2bit")}, {}}, &fourth);
  EXPECT_EQ(fifth.since("a"), fourth.generation());
  EXPECT_EQ(fifth.since("b"), second.generation());
}

TEST(CompressionTest, KeysOfOneKind) {
  Compression compression{{codec("2bit")}, {}};
  compression.keys[Key("b")] = 0;
  compression.keys[Key(3)] = 0;
  EXPECT_NE(
      error_text<c10::TypeError>([&] {
        check_compression("op", compression);
      }).find("keys, as others of the call"),
      std::string::npos);
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
