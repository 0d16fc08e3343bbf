// The fake NCCL: results, order and errors.
#include "nccl.h"

#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <cstdlib>
#include <map>
#include <string>
#include <vector>

#include "devices_test.h"
#include "graph.h"
#include "kvstore.h"
#include "stores.h"

namespace torchkv::mock_cuda {
namespace {

constexpr int kRanks = 4;
constexpr int64_t kCount = 3;

// One clique, with a large and a small buffer on each device: rank r has the
// numbers r * 100, r * 100 + 1, ... in the large one and r in the small one.
class NcclTest : public DevicesTest {
 protected:
  NcclTest() {
    std::vector<int> devices;
    for (int rank = 0; rank < kRanks; ++rank) {
      devices.push_back(rank);
      large[rank] =
          (at::arange(kRanks * kCount, at::kFloat) + rank * 100).to(cuda(rank));
      small[rank] =
          at::full(kCount, rank, at::device(cuda(rank)).dtype(at::kFloat));
    }
    comms = nccl::clique(devices); // which is kept
  }

  void* stream_of(int rank) const {
    return current_stream(cuda(rank)).native_handle();
  }
  nccl::Result reduce_scatter(
      int rank,
      const at::Tensor& send,
      const at::Tensor& receive,
      int64_t count = kCount) const {
    return functions.reduce_scatter(
        send.const_data_ptr(),
        receive.mutable_data_ptr(),
        static_cast<size_t>(count),
        nccl::kFloat32,
        nccl::kSum,
        comms[static_cast<size_t>(rank)],
        stream_of(rank));
  }
  nccl::Result all_gather(
      int rank,
      const at::Tensor& send,
      const at::Tensor& receive,
      int64_t count = kCount) const {
    return functions.all_gather(
        send.const_data_ptr(),
        receive.mutable_data_ptr(),
        static_cast<size_t>(count),
        nccl::kFloat32,
        comms[static_cast<size_t>(rank)],
        stream_of(rank));
  }
  // Runs `call` for each rank in one group; returns the group's result.
  template <class Call>
  nccl::Result grouped(Call call, int num_ranks = kRanks) const {
    EXPECT_EQ(functions.group_start(), 0);
    for (int rank = 0; rank < num_ranks; ++rank) {
      EXPECT_EQ(call(rank), 0);
    }
    return functions.group_end();
  }
  nccl::Result reduce_scatter_all() const {
    return grouped([&](int rank) {
      return reduce_scatter(rank, large.at(rank), small.at(rank));
    });
  }
  nccl::Result all_gather_all() const {
    return grouped([&](int rank) {
      return all_gather(rank, small.at(rank), large.at(rank));
    });
  }

  // The elements of a large buffer that belong to a rank.
  static at::Tensor part_of(const at::Tensor& tensor, int rank) {
    return tensor.narrow(0, rank * kCount, kCount);
  }

  const nccl::Functions& functions = nccl_functions();
  c10::ArrayRef<nccl::Comm> comms;
  std::map<int, at::Tensor> large; // by rank
  std::map<int, at::Tensor> small;
};

// 0 + 100 + 200 + 300, and four times the place.
at::Tensor expected_sum() {
  return at::arange(kRanks * kCount, at::kFloat) * kRanks + 600;
}

at::Tensor expected_gathered() {
  return at::arange(kRanks, at::kFloat).repeat_interleave(kCount);
}

// --- What ranks receive
// -------------------------------------------------------------------------

TEST_F(NcclTest, ReduceScatterGivesEachRankItsShardOfTheSum) {
  const int before = num_nccl_operations();
  EXPECT_EQ(reduce_scatter_all(), 0);
  EXPECT_EQ(num_nccl_operations() - before, 1);
  for (int rank = 0; rank < kRanks; ++rank) {
    EXPECT_TRUE(at::equal(small.at(rank).cpu(), part_of(expected_sum(), rank)));
  }
}

TEST_F(NcclTest, AllGatherGivesAllRanksAllShards) {
  const int before = num_nccl_operations();
  EXPECT_EQ(all_gather_all(), 0);
  EXPECT_EQ(num_nccl_operations() - before, 1);
  for (const auto& [rank, received] : large) {
    EXPECT_TRUE(at::equal(received.cpu(), expected_gathered()));
  }
}

TEST_F(NcclTest, InPlaceIsTheRanksOwnShard) {
  const nccl::Result scattered = grouped([&](int rank) {
    return reduce_scatter(rank, large.at(rank), part_of(large.at(rank), rank));
  });
  EXPECT_EQ(scattered, 0);
  for (int rank = 0; rank < kRanks; ++rank) {
    const at::Tensor all = large.at(rank).cpu();
    EXPECT_TRUE(at::equal(part_of(all, rank), part_of(expected_sum(), rank)));
    const int other = (rank + 1) % kRanks;
    EXPECT_EQ(
        part_of(all, other)[0].item<int64_t>(), rank * 100 + other * kCount);
  }
  const nccl::Result gathered = grouped([&](int rank) {
    return all_gather(rank, part_of(large.at(rank), rank), large.at(rank));
  });
  EXPECT_EQ(gathered, 0);
  for (const auto& [rank, received] : large) {
    EXPECT_TRUE(at::equal(received.cpu(), expected_sum()));
  }
}

// --- Order
// -------------------------------------------------------------------------

// On another stream of the same device.
std::string zero_elsewhere(const at::Tensor& tensor) {
  const c10::StreamGuard guard(new_stream(tensor.device()));
  return refusal([&] { tensor.zero_(); });
}

TEST_F(NcclTest, ReceivesAreOrderedAfterAllSends) {
  for (const bool scatters : {true, false}) {
    const auto run = [&] {
      return scatters ? reduce_scatter_all() : all_gather_all();
    };
    EXPECT_EQ(run(), 0);
    // Rank 3's buffer may be freed or overwritten once rank 1 is done.
    const at::Tensor& sent = (scatters ? large : small).at(3);
    EXPECT_NE(zero_elsewhere(sent), "");
    const c10::Stream stream = new_stream(cuda(3));
    order(current_stream(cuda(1)), stream);
    {
      const c10::StreamGuard guard(stream);
      EXPECT_EQ(refusal([&] { sent.zero_(); }), "");
    }
    order(stream, current_stream(cuda(3)));
  }
}

TEST_F(NcclTest, EachStreamReadsItsRanksInput) {
  const c10::Stream writer = new_stream(cuda(2));
  order(current_stream(cuda(2)), writer);
  {
    const c10::StreamGuard guard(writer);
    large.at(2).zero_();
    small.at(2).zero_();
  }
  EXPECT_NE(
      refusal([&] {
        reduce_scatter_all();
      }).find("ncclReduceScatter on stream 0 of cuda:2 reads"),
      std::string::npos);
  EXPECT_NE(
      refusal([&] {
        all_gather_all();
      }).find("ncclAllGather on stream 0 of cuda:2 reads"),
      std::string::npos);
  order(writer, current_stream(cuda(2)));
  EXPECT_EQ(refusal([&] { reduce_scatter_all(); }), "");
}

TEST_F(NcclTest, EachStreamWritesItsRanksOutput) {
  const c10::Stream reader = new_stream(cuda(2));
  order(current_stream(cuda(2)), reader);
  {
    const c10::StreamGuard guard(reader);
    large.at(2).sum();
    small.at(2).sum();
  }
  EXPECT_NE(
      refusal([&] {
        reduce_scatter_all();
      }).find("ncclReduceScatter on stream 0 of cuda:2 writes"),
      std::string::npos);
  EXPECT_NE(
      refusal([&] {
        all_gather_all();
      }).find("ncclAllGather on stream 0 of cuda:2 writes"),
      std::string::npos);
  order(reader, current_stream(cuda(2)));
}

// --- Errors
// -------------------------------------------------------------------------

TEST_F(NcclTest, ASingleOperationWouldDeadlock) {
  EXPECT_NE(reduce_scatter(0, large.at(0), small.at(0)), 0);
  EXPECT_NE(all_gather(0, small.at(0), large.at(0)), 0);
}

TEST_F(NcclTest, AllRanksMustJoinAnOperation) {
  const auto scatter = [&](int rank, int64_t count) {
    return reduce_scatter(rank, large.at(rank), small.at(rank), count);
  };
  EXPECT_NE(grouped([&](int rank) { return scatter(rank, 1); }, kRanks - 1), 0);
  EXPECT_NE(grouped([&](int rank) { return scatter(rank, rank); }), 0);
  EXPECT_NE(
      grouped([&](int rank) {
        return rank == 1 ? all_gather(rank, small.at(rank), large.at(rank))
                         : scatter(rank, kCount);
      }),
      0);
  EXPECT_EQ(grouped([&](int rank) { return scatter(rank, 1); }), 0);
}

TEST_F(NcclTest, ARankMustBeOnItsDevice) {
  const auto on_a_stream_of = [&](int other) {
    return grouped([&](int rank) {
      return functions.all_gather(
          small.at(rank).const_data_ptr(),
          large.at(rank).mutable_data_ptr(),
          kCount,
          nccl::kFloat32,
          comms[static_cast<size_t>(rank)],
          new_stream(cuda(rank == 0 ? other : rank)).native_handle());
    });
  };
  for (int rank = 0; rank < kRanks; ++rank) {
    current_stream(cuda(rank)).synchronize();
  }
  EXPECT_NE(on_a_stream_of(1), 0);
  EXPECT_EQ(on_a_stream_of(0), 0);
  for (int rank = 0; rank < kRanks; ++rank) {
    c10::impl::VirtualGuardImpl(c10::kCUDA)
        .synchronizeDevice(static_cast<c10::DeviceIndex>(rank));
  }
}

TEST_F(NcclTest, TheShardOfAnotherRankIsNotInPlace) {
  const auto other = [](int rank) { return (rank + 1) % kRanks; };
  EXPECT_NE(
      grouped([&](int rank) {
        const auto& all = large.at(rank);
        return reduce_scatter(rank, all, part_of(all, other(rank)));
      }),
      0);
  EXPECT_NE(
      grouped([&](int rank) {
        const auto& all = large.at(rank);
        return all_gather(rank, part_of(all, other(rank)), all);
      }),
      0);
}

TEST_F(NcclTest, BuffersMustFitTheirMemory) {
  // The large one needs kRanks times as much.
  EXPECT_NE(
      refusal([&] {
        grouped([&](int rank) {
          return reduce_scatter(rank, small.at(rank), large.at(rank));
        });
      }).find("behind the end"),
      std::string::npos);
  EXPECT_NE(
      refusal([&] {
        grouped([&](int rank) {
          return all_gather(rank, large.at(rank), small.at(rank));
        });
      }).find("behind the end"),
      std::string::npos);
}

// After an error, the communicators are unusable.
TEST_F(NcclTest, AllStreamsOfAnOperationAreCapturedOrNone) {
  static const nccl::Functions others = functions; // with separate cliques
  nccl::set_functions(&others);
  comms = nccl::clique({0, 1, 2, 3});
  EXPECT_EQ(all_gather_all(), 0);
  const c10::Stream captured = new_stream(cuda(0));
  {
    const c10::StreamGuard guard(captured);
    begin_capture(captured);
    EXPECT_NE(all_gather_all(), 0);
    end_capture(captured);
  }
  EXPECT_NE(all_gather_all(), 0);
}

// --- How a store uses it
// -------------------------------------------------------------------------

class NcclStoreTest : public DevicesTest {
 protected:
  NcclStoreTest() {
    functions() = nccl_functions();
    nccl::set_functions(&functions()); // whose cliques no other test has
  }
  static nccl::Functions& functions() {
    static nccl::Functions functions{};
    return functions;
  }

  // Pushes ones of some devices; returns the error.
  static std::string push(KVStore& store, int key, std::vector<int> devices) {
    std::vector<at::Tensor> values;
    for (const int device : devices) {
      values.push_back(at::ones({2}, at::device(cuda(device))));
    }
    return refusal([&] { store.push(key, Tensors::replicas(values)); });
  }
};

// Rejected before NCCL is called, which would lose the communicators.
TEST_F(NcclStoreTest, CapturesAreRejectedBeforeNccl) {
  const auto store = make_store("nccl");
  store->init(1, at::zeros({2}, at::device(cuda(0))));
  EXPECT_EQ(push(*store, 1, {0, 1}), "");
  const int before = num_nccl_operations();
  for (const int device : {0, 1}) {
    const c10::Stream captured = new_stream(cuda(device));
    const c10::StreamGuard guard(captured);
    std::vector<at::Tensor> values;
    for (const int d : {0, 1}) {
      values.push_back(at::ones({2}, at::device(cuda(d))));
    }
    begin_capture(captured);
    const std::string said =
        refusal([&] { store->push(1, Tensors::replicas(values)); });
    EXPECT_NE(said.find("unexpected CUDA graph capture on"), std::string::npos)
        << said;
    EXPECT_NE(refusal([&] { store->pull(1, Tensors::replicas(values)); }), "");
    refusal([&] { end_capture(captured); });
  }
  EXPECT_EQ(num_nccl_operations(), before);
  EXPECT_EQ(push(*store, 1, {0, 1}), "") << "the communicators work on";
  EXPECT_TRUE(at::equal(store->pull(1)[0].cpu(), at::full({2}, 2.F)));
}

TEST_F(NcclStoreTest, AFailedCommunicatorIsNotReused) {
  const auto store = make_store("nccl");
  for (const int key : {1, 2}) {
    store->init(key, at::zeros({2}, at::device(cuda(0))));
  }
  EXPECT_EQ(push(*store, 1, {0, 1, 2}), "");
  functions().group_end = [] {
    nccl_functions().group_end();
    return 1;
  };
  EXPECT_NE(
      push(*store, 1, {0, 1, 2}).find("NCCL: ncclGroupEnd failed"),
      std::string::npos);
  functions().group_end = nccl_functions().group_end;
  const std::string said = push(*store, 1, {0, 1, 2});
  EXPECT_NE(
      said.find("failed before on CUDA devices 0, 1, 2"), std::string::npos)
      << said;
  EXPECT_NE(said.find("ncclGroupEnd failed"), std::string::npos) << said;
  EXPECT_EQ(push(*store, 2, {0, 3}), "") << "others work on";
}

// A blocking launch would wait for later ones.
TEST_F(NcclStoreTest, BlockingLaunchesAreRejected) {
  setenv("CUDA_LAUNCH_BLOCKING", "1", /*replace=*/1);
  EXPECT_NE(
      refusal([] { make_store("nccl"); }).find("CUDA_LAUNCH_BLOCKING=1"),
      std::string::npos);
  reset(1);
  EXPECT_EQ(refusal([] { make_store("nccl"); }), "");
  reset(4);
  setenv("CUDA_LAUNCH_BLOCKING", "0", /*replace=*/1);
  EXPECT_EQ(refusal([] { make_store("nccl"); }), "");
  unsetenv("CUDA_LAUNCH_BLOCKING");
}

} // namespace
} // namespace torchkv::mock_cuda
