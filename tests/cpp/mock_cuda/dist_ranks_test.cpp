// Two ranks of one host, each with fake GPUs: processes of this program, which
// runs its test again as a rank.
#include <ATen/ATen.h>
#include <arpa/inet.h>
#include <c10/util/ScopeExit.h>
#include <gtest/gtest.h>
#include <netinet/in.h>
#include <spawn.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <array>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <iterator>
#include <map>
#include <sstream>
#include <string>
#include <string_view>
#include <vector>

#include "devices_test.h"
#include "dist/byte_counts.h"
#include "host_memory.h"
#include "stores.h"

namespace torchkv {
namespace {

using mock_cuda::cuda;
using mock_cuda::pinned_host_memory;

constexpr int kNumRanks = 2;
constexpr const char* kIsRank = "TORCHKV_TEST_IS_RANK";

int free_port() {
  const int socket = ::socket(AF_INET, SOCK_STREAM, 0);
  const auto close = c10::make_scope_exit([&] { ::close(socket); });
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  auto* const any = reinterpret_cast<sockaddr*>(&address);
  socklen_t size = sizeof(address);
  EXPECT_EQ(bind(socket, any, size), 0);
  EXPECT_EQ(getsockname(socket, any, &size), 0);
  return ntohs(address.sin_port);
}

// This program with one test, as a rank.
pid_t start_rank(int rank, int port, const std::string& test) {
  std::vector<std::string> variables{
      std::string(kIsRank) + "=1",
      "RANK=" + std::to_string(rank),
      "WORLD_SIZE=" + std::to_string(kNumRanks),
      "MASTER_ADDR=127.0.0.1",
      "MASTER_PORT=" + std::to_string(port)};
  for (char** variable = environ; *variable != nullptr; ++variable) {
    // It may be one of several parts of the tests.
    if (std::string_view(*variable).rfind("GTEST_", 0) != 0) {
      variables.emplace_back(*variable);
    }
  }
  std::vector<std::string> arguments{
      "/proc/self/exe", "--gtest_brief=1", "--gtest_filter=" + test};
  const auto pointers = [](std::vector<std::string>& texts) {
    std::vector<char*> result(texts.size() + 1); // null at its end
    for (size_t i = 0; i < texts.size(); ++i) {
      result[i] = texts[i].data();
    }
    return result;
  };
  pid_t process = -1;
  const int error = posix_spawn(
      &process,
      arguments[0].c_str(),
      nullptr,
      nullptr,
      pointers(arguments).data(),
      pointers(variables).data());
  EXPECT_EQ(error, 0) << std::strerror(error);
  return process;
}

// Begin -> end of the memory of this process that other ranks may read.
std::map<uintptr_t, uintptr_t> shared_ranges() {
  std::map<uintptr_t, uintptr_t> ranges;
  std::ifstream maps("/proc/self/maps");
  for (std::string line; std::getline(maps, line);) {
    if (line.find("memfd:torchkv") != std::string::npos &&
        line.find(" rw-s ") != std::string::npos) {
      std::istringstream text(line);
      uintptr_t begin = 0;
      uintptr_t end = 0;
      char dash = 0;
      text >> std::hex >> begin >> dash >> end;
      ranges[begin] = end;
    }
  }
  return ranges;
}

bool is_shared(uintptr_t data) {
  const auto ranges = shared_ranges();
  const auto after = ranges.upper_bound(data);
  return after != ranges.begin() && data < std::prev(after)->second;
}

class DistRanksTest : public mock_cuda::DevicesTest {
 protected:
  // Expects that ranks which run this test succeed. True in the ranks.
  static bool is_rank() {
    if (std::getenv(kIsRank) != nullptr) {
      return true;
    }
    const auto* const info =
        ::testing::UnitTest::GetInstance()->current_test_info();
    const std::string test =
        std::string(info->test_suite_name()) + "." + info->name();
    const int port = free_port();
    std::array<pid_t, kNumRanks> processes{};
    for (int rank = 0; rank < kNumRanks; ++rank) {
      processes[rank] = start_rank(rank, port, test);
    }
    for (const pid_t process : processes) {
      int status = -1;
      EXPECT_EQ(waitpid(process, &status, 0), process);
      EXPECT_EQ(status, 0);
    }
    return false;
  }
};

TEST_F(DistRanksTest, DevicesWriteToMemoryThatOtherRanksRead) {
  if (!is_rank()) {
    return;
  }
  constexpr int64_t kNumElements = 300'000; // half of them on each server
  constexpr int64_t kBytes = 4 * kNumElements;
  constexpr int kNumSteps = 10;
  StoreOptions options;
  options.timeout = 60;
  const auto store = c10::make_intrusive<KVStore>("dist_sync", options);
  store->init("w", at::zeros({kNumElements}));
  store->set_optimizer("sgd", {{"lr", 1}});
  const auto count = static_cast<double>(store->rank() + 1);
  auto& counts = dist::byte_counts();
  std::map<const void*, size_t> pinned;
  const at::Tensor out = at::zeros({kNumElements}, cuda(1));
  for (int step = 1; step <= kNumSteps; ++step) {
    const at::Tensor first = at::full({kNumElements}, count, cuda(0));
    const at::Tensor second = at::full({kNumElements}, 2 * count, cuda(1));
    const int64_t sent = counts.sent;
    const int64_t named = counts.named;
    store->push("w", Tensors::replicas({first, second}));
    first.fill_(100); // what leaves the process is not the caller's memory
    store->barrier();
    store->pull("w", out);
    store->barrier();
    EXPECT_TRUE(at::equal(out.cpu(), at::full({kNumElements}, -9.0 * step)));
    // Half of the sum to the other server, half of the value to its worker.
    EXPECT_EQ(counts.sent - sent, 0);
    EXPECT_EQ(counts.named - named, kBytes);
    if (step == 1) {
      pinned = pinned_host_memory();
      EXPECT_FALSE(pinned.empty());
    }
  }
  // The sum was copied into the same memory in each step.
  EXPECT_EQ(pinned_host_memory(), pinned);
  for (const auto& [data, size] : pinned) {
    EXPECT_TRUE(is_shared(reinterpret_cast<uintptr_t>(data))) << size;
  }
  store->barrier();
  store->close();
}

} // namespace
} // namespace torchkv
