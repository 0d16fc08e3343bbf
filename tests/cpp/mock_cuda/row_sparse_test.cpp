// Sparse values on fake GPUs: refused before anything has changed.
#include <ATen/ATen.h>
#include <c10/util/Exception.h>
#include <gtest/gtest.h>

#include <string>

#include "devices_test.h"
#include "stores.h"

namespace torchkv {
namespace {

using mock_cuda::cuda;
using mock_cuda::expect_full;
using mock_cuda::full;
using mock_cuda::make_store;

class RowSparseDevicesTest : public mock_cuda::DevicesTest {
 protected:
  static at::Tensor one_row(const at::Tensor& like) {
    auto sizes = like.sizes().vec();
    sizes[0] = 1;
    return at::sparse_coo_tensor(
        at::zeros({1, 1}, at::kLong), at::ones(sizes), like.sizes());
  }
  template <class Call>
  static void expect_refused(Call call, const std::string& text) {
    try {
      call();
      ADD_FAILURE() << "expected: " << text;
    } catch (const c10::NotImplementedError& error) {
      EXPECT_NE(std::string(error.what()).find(text), std::string::npos)
          << error.what();
    }
  }
};

TEST_F(RowSparseDevicesTest, ValuesOfAKeyAreAllInCpuMemory) {
  const auto store = make_store();
  const at::Tensor value = full(1, at::kCPU);
  store->init(0, value);
  expect_refused(
      [&] {
        store->push(0, Tensors::replicas({one_row(value), full(2, cuda(1))}));
      },
      "push: expected values in CPU memory");
  expect_full(store->pull(0)[0], 1);
  EXPECT_EQ(store->version(0), 0);
  store->push(0, one_row(value));
  EXPECT_EQ(store->version(0), 1);
}

TEST_F(RowSparseDevicesTest, AStoredValueOnADeviceTakesNone) {
  const auto store = make_store();
  const at::Tensor value = full(1, at::kCPU);
  store->init({0, 1}, Tensors::one_each({value, value}));
  store->push(1, full(3, cuda(2)));
  expect_refused(
      [&] {
        store->push(
            {0, 1}, Tensors::one_each({one_row(value), one_row(value)}));
      },
      "push: expected a stored value in CPU memory");
  expect_full(store->pull(0)[0], 1);
  expect_full(store->pull(1)[0].cpu(), 3);
}

} // namespace
} // namespace torchkv
