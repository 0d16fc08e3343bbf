// Places of a call's tensors.
#include "memory/placement.h"

#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "devices_test.h"
#include "error_text.h"

namespace torchkv {
namespace {

using List = std::vector<Place>;

using mock_cuda::cuda;

// The places of a pull into tensors on `devices`.
List places_of(const Places& places, const std::vector<c10::Device>& devices) {
  std::vector<at::Tensor> outs;
  for (const auto device : devices) {
    outs.push_back(at::empty({1}, at::device(device)));
  }
  const auto list = places.of({nullptr, {}, outs, nullptr});
  return {list.begin(), list.end()};
}

class PlacesTest : public mock_cuda::DevicesTest {
 protected:
  Runtime& runtime_ = default_runtime();
};

TEST_F(PlacesTest, AreTheAcceleratorsOfACall) {
  const Places places("");
  EXPECT_FALSE(places.are_logical());
  EXPECT_EQ(places_of(places, {c10::kCPU, c10::kCPU}), List());
  EXPECT_EQ(
      places_of(places, {cuda(2), c10::kCPU, cuda(1), cuda(2)}),
      (List{{cuda(2), -1}, {cuda(1), -1}}));
}

TEST_F(PlacesTest, OfOneDeviceAreUsedInTurn) {
  const Places places("cuda:1,cuda:2,cuda:1");
  EXPECT_TRUE(places.are_logical());
  EXPECT_EQ(places_of(places, {cuda(1)}), (List{{cuda(1), 0}}));
  EXPECT_EQ(
      places_of(places, {cuda(1), cuda(1), cuda(2)}),
      (List{{cuda(1), 0}, {cuda(1), 2}, {cuda(2), 1}}));
  // More tensors than places share the last.
  EXPECT_EQ(
      places_of(places, {cuda(1), cuda(1), cuda(1), cuda(1)}),
      (List{{cuda(1), 0}, {cuda(1), 2}}));
  const Places default_index("cuda,cuda");
  EXPECT_EQ(places_of(default_index, {cuda(0)}), (List{{cuda(0), 0}}));
  // A device that is not listed is itself.
  const c10::Device other = cuda(3);
  EXPECT_EQ(places_of(places, {other, c10::kCPU}), (List{{other, -1}}));
}

TEST_F(PlacesTest, MayIncludeTheCpu) {
  const Places places("cpu,cpu:0");
  const c10::Device cpu(c10::kCPU);
  EXPECT_EQ(places_of(places, {cpu, cpu}), (List{{cpu, 0}, {cpu, 1}}));
}

TEST_F(PlacesTest, EachHasItsOwnStream) {
  Streams streams(runtime_);
  const c10::Stream first = streams.of({cuda(1), 0});
  EXPECT_NE(first, streams.of({cuda(1), 1}));
  EXPECT_EQ(first, streams.of({cuda(1), 0}));
}

TEST_F(PlacesTest, RejectInvalidLists) {
  for (const auto* text :
       {"gpu:0", "cuda:0,,cuda:0", "cuda:0;cuda:1", " ", "cuda:0,"}) {
    EXPECT_EQ(
        testing::error_text([&] { Places{text}; }),
        std::string(
            "create: expected TORCHKV_PLACES to be a list of devices "
            "like 'cuda:0,cuda:0', but got '") +
            text + "'");
  }
}

} // namespace
} // namespace torchkv
