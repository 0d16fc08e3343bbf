// What a process may still use, of systems whose files are in a folder.
#include "dist/transport/available_memory.h"

#include <gtest/gtest.h>
#include <unistd.h>

#include <cstddef>
#include <filesystem>
#include <fstream>
#include <string>

namespace torchkv::dist {
namespace {

namespace fs = std::filesystem;

constexpr size_t kGigabyte = size_t{1} << 30U;

class AvailableMemoryTest : public ::testing::Test {
 protected:
  AvailableMemoryTest()
      : root_(
            fs::path(::testing::TempDir()) /
            ("available_memory_" + std::to_string(getpid()))) {
    // 8 GiB.
    write(
        "/proc/meminfo",
        "MemTotal: 16777216 kB\nMemFree: 1048576 kB\n"
        "MemAvailable: 8388608 kB\nHugePages_Total: 0\n");
  }
  ~AvailableMemoryTest() override {
    fs::remove_all(root_);
  }
  void write(const std::string& path, const std::string& text) const {
    const fs::path file = root_.string() + path;
    fs::create_directories(file.parent_path());
    std::ofstream(file) << text;
  }
  // A group of version 2.
  void write_group(
      const std::string& path,
      const std::string& most,
      size_t used,
      size_t inactive_file) const {
    const std::string folder = "/sys/fs/cgroup" + path;
    write(folder + "/memory.max", most + '\n');
    write(folder + "/memory.current", std::to_string(used));
    write(
        folder + "/memory.stat",
        "anon 1\ninactive_file " + std::to_string(inactive_file) +
            "\nfile 7\n");
  }
  size_t available() const {
    return available_memory(root_.string());
  }

  const fs::path root_;
};

TEST_F(AvailableMemoryTest, WithoutGroupsItIsTheSystems) {
  EXPECT_EQ(available(), 8 * kGigabyte);
  write("/proc/self/cgroup", "0::/user/session\n");
  EXPECT_EQ(available(), 8 * kGigabyte); // a group without files
}

TEST_F(AvailableMemoryTest, AGroupLimitsIt) {
  write("/proc/self/cgroup", "0::/user/session\n");
  write_group("/user/session", std::to_string(4 * kGigabyte), kGigabyte, 0);
  EXPECT_EQ(available(), 3 * kGigabyte);
  // What it would give back.
  write_group(
      "/user/session", std::to_string(4 * kGigabyte), kGigabyte, kGigabyte / 2);
  EXPECT_EQ(available(), 7 * kGigabyte / 2);
  // Above its limit.
  write_group("/user/session", "4096", kGigabyte, 0);
  EXPECT_EQ(available(), 0);
  write_group("/user/session", "max", kGigabyte, 0);
  EXPECT_EQ(available(), 8 * kGigabyte);
}

TEST_F(AvailableMemoryTest, GroupsThatContainItLimitItToo) {
  write("/proc/self/cgroup", "0::/user/session\n");
  write_group("/user/session", "max", 0, 0);
  write_group("/user", std::to_string(2 * kGigabyte), kGigabyte, 0);
  EXPECT_EQ(available(), kGigabyte);
}

TEST_F(AvailableMemoryTest, AContainerSeesItsGroupAsTheRoot) {
  write("/proc/self/cgroup", "0::/\n");
  write_group("", std::to_string(2 * kGigabyte), kGigabyte / 2, 0);
  EXPECT_EQ(available(), 3 * kGigabyte / 2);
}

TEST_F(AvailableMemoryTest, GroupsOfVersion1LimitIt) {
  write(
      "/proc/self/cgroup",
      "12:cpu,cpuacct:/job\n5:memory:/job\nwrong\n0::/elsewhere\n");
  const std::string folder = "/sys/fs/cgroup/memory/job";
  write(folder + "/memory.limit_in_bytes", std::to_string(2 * kGigabyte));
  write(folder + "/memory.usage_in_bytes", std::to_string(kGigabyte));
  write(
      folder + "/memory.stat",
      "inactive_file 1\ntotal_inactive_file " + std::to_string(kGigabyte / 4));
  EXPECT_EQ(available(), 5 * kGigabyte / 4);
}

} // namespace
} // namespace torchkv::dist
