#include "dist/transport/shared_memory.h"

#include <c10/util/Exception.h>
#include <c10/util/ScopeExit.h>
#include <fcntl.h>
#include <gtest/gtest.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstring>
#include <memory>
#include <string>
#include <vector>

#include "../../error_text.h"
#include "dist/transport/available_memory.h"

namespace torchkv::dist {
namespace {

using ::torchkv::testing::error_text;

constexpr size_t kMegabyte = size_t{1} << 20U;

TEST(SharedMemoryTest, BlocksAreAlignedAndDistinct) {
  const auto memory = SharedMemory::create();
  std::vector<std::shared_ptr<void>> blocks;
  for (const size_t size : {size_t{1}, size_t{4096}, size_t{4097}, kMegabyte}) {
    blocks.push_back(memory->allocate(size));
    std::memset(blocks.back().get(), static_cast<int>(blocks.size()), size);
    EXPECT_EQ(
        reinterpret_cast<uintptr_t>(blocks.back().get()) %
            SharedMemory::kAlignment,
        0);
  }
  for (size_t i = 0; i < blocks.size(); ++i) {
    EXPECT_EQ(*static_cast<const char*>(blocks[i].get()), i + 1);
  }
  EXPECT_EQ(memory->num_used(), size_t{4} * 4096 + kMegabyte);
  EXPECT_EQ(memory->num_segments(), 1);
  blocks.clear();
  EXPECT_EQ(memory->num_used(), 0);
}

TEST(SharedMemoryTest, FreedBlocksAreJoinedAndUsedAgain) {
  const auto memory = SharedMemory::create();
  std::vector<std::shared_ptr<void>> blocks;
  const size_t size = memory->segments()[0]->size();
  for (int i = 0; i < 4; ++i) {
    blocks.push_back(memory->allocate(size / 4));
  }
  EXPECT_EQ(memory->num_segments(), 1);
  void* const first = blocks[1].get();
  // In an order that joins with the one before, the one after, and both.
  for (const size_t i : {size_t{1}, size_t{3}, size_t{2}}) {
    blocks[i].reset();
  }
  EXPECT_EQ(memory->allocate(size / 4 * 3).get(), first);
  EXPECT_EQ(memory->num_segments(), 1);
}

TEST(SharedMemoryTest, GrowsByFewSegments) {
  const auto memory = SharedMemory::create();
  const size_t size = memory->segments()[0]->size();
  std::vector<std::shared_ptr<void>> blocks;
  for (int i = 0; i < 8; ++i) {
    blocks.push_back(memory->allocate(size)); // not touched
    ASSERT_NE(blocks.back(), nullptr);
  }
  EXPECT_LE(memory->num_segments(), 4);
}

TEST(SharedMemoryTest, FindsWhatLiesInIt) {
  const auto memory = SharedMemory::create();
  const auto block = memory->allocate(10000);
  const auto* const data = static_cast<const char*>(block.get());
  const auto region = memory->find(data + 100, 500);
  ASSERT_TRUE(region.has_value());
  EXPECT_EQ(region->segment, 0);
  EXPECT_EQ(region->size, 500);
  EXPECT_EQ(
      static_cast<const void*>(memory->segments()[0]->data() + region->offset),
      data + 100);
  const char elsewhere = 0;
  EXPECT_FALSE(memory->find(&elsewhere, 1).has_value());
  const Segment& segment = *memory->segments()[0];
  EXPECT_TRUE(memory->find(segment.data(), segment.size()).has_value());
  EXPECT_FALSE(memory->find(segment.data() + 1, segment.size()).has_value());
  EXPECT_FALSE(memory->find(segment.data() + segment.size(), 1).has_value());
}

TEST(SharedMemoryTest, FreedMemoryGoesBackToTheSystem) {
  const size_t size = 64 * kMegabyte;
  if (available_memory() < 4 * size) {
    GTEST_SKIP() << "not enough memory";
  }
  const auto memory = SharedMemory::create();
  {
    const auto block = memory->allocate(size);
    std::memset(block.get(), 1, size);
  }
  // In a page of the file that is gone there are zeros.
  EXPECT_EQ(static_cast<int>(*memory->segments()[0]->data()), 0);
}

TEST(SharedMemoryTest, BlocksOutliveIt) {
  auto memory = SharedMemory::create();
  const auto block = memory->allocate(10);
  memory.reset();
  std::memset(block.get(), 1, 10);
  EXPECT_EQ(*static_cast<const char*>(block.get()), 1);
}

TEST(SharedMemoryTest, MoreThanTheSystemHasIsRefused) {
  const auto memory = SharedMemory::create();
  EXPECT_EQ(memory->allocate(available_memory() + 64 * kMegabyte), nullptr);
  EXPECT_NE(memory->allocate(10), nullptr);
}

TEST(SharedMemoryTest, SmallBlocksAreRefusedToo) {
  size_t available = 64 * kMegabyte;
  int num_asked = 0;
  const auto memory = SharedMemory::create([&] {
    ++num_asked;
    return available;
  });
  std::vector<std::shared_ptr<void>> blocks;
  for (int i = 0; i < 1024; ++i) { // 4 MiB
    blocks.push_back(memory->allocate(SharedMemory::kAlignment));
    ASSERT_NE(blocks.back(), nullptr);
  }
  EXPECT_EQ(num_asked, 4); // not for each
  available = 0;
  int num_given = 0;
  while (memory->allocate(SharedMemory::kAlignment) != nullptr) {
    ++num_given;
    ASSERT_LE(num_given, 256);
  }
  EXPECT_EQ(memory->allocate(1), nullptr);
  available = 64 * kMegabyte;
  EXPECT_NE(memory->allocate(1), nullptr);
}

struct LastWarning final : c10::WarningHandler {
  void process(const c10::Warning& warning) override {
    ++count;
    text = warning.msg();
  }
  int count = 0;
  std::string text;
};

TEST(SharedMemoryTest, ALineSaysWhyNoMoreIsShared) {
  const auto memory = SharedMemory::create();
  LastWarning warning;
  const c10::WarningUtils::WarningHandlerGuard guard(&warning);
  const c10::WarningUtils::WarnAlways always; // it is one line otherwise
  rlimit before{};
  ASSERT_EQ(getrlimit(RLIMIT_NOFILE, &before), 0);
  {
    const rlimit none{0, before.rlim_max}; // another segment needs a descriptor
    ASSERT_EQ(setrlimit(RLIMIT_NOFILE, &none), 0);
    const auto restore =
        c10::make_scope_exit([&] { setrlimit(RLIMIT_NOFILE, &before); });
    EXPECT_EQ(memory->allocate(512 * kMegabyte), nullptr);
    EXPECT_EQ(memory->allocate(512 * kMegabyte), nullptr);
  }
  EXPECT_NE(memory->allocate(512 * kMegabyte), nullptr);
  EXPECT_EQ(warning.count, 2);
  EXPECT_NE(warning.text.find("values travel over sockets"), std::string::npos)
      << warning.text;
  EXPECT_NE(warning.text.find("Too many open files"), std::string::npos)
      << warning.text;
}

TEST(SharedMemoryTest, AForkedChildReadsAndFreesNothing) {
  const auto memory = SharedMemory::create();
  auto block = memory->allocate(2 * kMegabyte);
  std::memset(block.get(), 1, 2 * kMegabyte);
  const pid_t child = fork();
  if (child == 0) {
    const bool reads = *static_cast<const char*>(block.get()) == 1;
    block.reset();
    _exit(reads ? 0 : 1);
  }
  int status = 0;
  waitpid(child, &status, 0);
  EXPECT_EQ(status, 0);
  EXPECT_EQ(*static_cast<const char*>(block.get()), 1);
  EXPECT_EQ(memory->num_used(), 2 * kMegabyte);
}

TEST(SegmentTest, OthersCanOnlyReadAndNobodyResizes) {
  const Segment own(8192);
  own.data()[0] = std::byte{7};
  const Segment other(dup(own.file()), 8192);
  EXPECT_EQ(other.data()[0], std::byte{7});
  EXPECT_NE(other.data(), own.data());
  EXPECT_EQ(
      mmap(nullptr, 8192, PROT_WRITE, MAP_SHARED, own.file(), 0), MAP_FAILED);
  EXPECT_NE(ftruncate(own.file(), 0), 0);
  const int writable = open(
      ("/proc/self/fd/" + std::to_string(own.file())).c_str(),
      O_RDWR | O_CLOEXEC);
  ASSERT_GE(writable, 0);
  EXPECT_NE(ftruncate(writable, 0), 0);
  EXPECT_NE(ftruncate(writable, 16384), 0);
  close(writable);
}

TEST(SegmentTest, AFileThatMayShrinkIsRefused) {
  const int file = memfd_create("test", MFD_CLOEXEC | MFD_ALLOW_SEALING);
  ASSERT_EQ(ftruncate(file, 8192), 0);
  EXPECT_NE(
      error_text([&] {
        const Segment segment(dup(file), 8192);
      }).find("expected a sealed file"),
      std::string::npos);
  ASSERT_EQ(fcntl(file, F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW), 0);
  EXPECT_NE(
      error_text([&] {
        const Segment segment(dup(file), 8193);
      }).find("expected a sealed file"),
      std::string::npos);
  const Segment segment(file, 8192);
  EXPECT_EQ(segment.size(), 8192);
}

} // namespace
} // namespace torchkv::dist
