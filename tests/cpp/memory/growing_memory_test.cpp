// Memory that is resized: its bytes, its alignment, and running out of it.
#include "memory/growing_memory.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <fstream>
#include <limits>
#include <new>

#ifdef __linux__
#include <unistd.h>
#endif

namespace torchkv {
namespace {

constexpr size_t kMiB = size_t{1} << 20U;

// The byte written at an offset.
unsigned char written_at(size_t offset) {
  return static_cast<unsigned char>(offset / 4096 * 31 + offset % 251);
}

TEST(GrowingMemoryTest, IsEmptyAtFirst) {
  const GrowingMemory memory;
  EXPECT_EQ(memory.data(), nullptr);
}

TEST(GrowingMemoryTest, KeepsItsBytes) {
  GrowingMemory memory;
  size_t num_written = 0;
  // On the heap, in pages, in more and less of them, and back.
  for (const size_t num_bytes :
       {size_t{3},
        kMiB,
        8 * kMiB,
        8 * kMiB + 1,
        40 * kMiB,
        64 * kMiB + 5,
        20 * kMiB,
        33 * kMiB,
        9 * kMiB,
        2 * kMiB,
        size_t{7},
        12 * kMiB,
        size_t{0},
        size_t{100}}) {
    memory.resize(num_bytes);
    num_written = std::min(num_written, num_bytes);
    auto* const bytes = static_cast<unsigned char*>(memory.data());
    size_t num_wrong = 0;
    for (size_t i = 0; i < num_written; ++i) {
      num_wrong += static_cast<size_t>(bytes[i] != written_at(i));
    }
    EXPECT_EQ(num_wrong, 0) << num_bytes;
    for (size_t i = num_written; i < num_bytes; ++i) {
      bytes[i] = written_at(i);
    }
    num_written = num_bytes;
  }
}

#ifdef __linux__
TEST(GrowingMemoryTest, LargeMemoryBeginsAtAHugePage) {
  GrowingMemory memory;
  GrowingMemory other; // in the way
  for (size_t num_bytes = 8 * kMiB; num_bytes < 300 * kMiB;
       num_bytes += num_bytes / 2) {
    memory.resize(num_bytes);
    other.resize(num_bytes);
    EXPECT_EQ(reinterpret_cast<uintptr_t>(memory.data()) % (2 * kMiB), 0);
    EXPECT_EQ(reinterpret_cast<uintptr_t>(other.data()) % (2 * kMiB), 0);
  }
}
#endif

void expect_too_much(size_t too_much) {
  for (const size_t num_bytes : {size_t{5}, 16 * kMiB}) {
    GrowingMemory memory;
    memory.resize(num_bytes);
    std::memset(memory.data(), 7, num_bytes);
    const void* const before = memory.data();
    EXPECT_THROW(memory.resize(too_much), std::bad_alloc);
    EXPECT_EQ(memory.data(), before);
    EXPECT_EQ(static_cast<const char*>(memory.data())[num_bytes - 1], 7);
  }
}

TEST(GrowingMemoryTest, TooMuchForTheAddressesChangesNothing) {
  expect_too_much(std::numeric_limits<size_t>::max() / 4);
  expect_too_much(std::numeric_limits<size_t>::max());
}

#ifdef __linux__
TEST(GrowingMemoryTest, TooMuchForTheMachineChangesNothing) {
  int overcommit = 1;
  std::ifstream("/proc/sys/vm/overcommit_memory") >> overcommit;
  if (overcommit == 1) {
    GTEST_SKIP() << "the system promises any amount of memory";
  }
  const auto of_machine = static_cast<size_t>(sysconf(_SC_PHYS_PAGES)) *
      static_cast<size_t>(sysconf(_SC_PAGESIZE));
  expect_too_much(16 * of_machine);
}

TEST(GrowingMemoryTest, ReturnsItsMemory) {
  const auto num_pages = [] { // of the process's addresses
    size_t result = 0;
    std::ifstream("/proc/self/statm") >> result;
    return result;
  };
  const size_t before = num_pages();
  for (int i = 0; i < 100; ++i) {
    GrowingMemory memory;
    // Little on the heap, whose memory a sanitizer does not return.
    for (const size_t num_bytes : {size_t{1}, 20 * kMiB, 50 * kMiB}) {
      memory.resize(num_bytes);
    }
    memory.resize(i % 2 == 0 ? 30 * kMiB : 1);
  }
  EXPECT_LT(num_pages(), before + 1024 * kMiB / 4096);
}
#endif

} // namespace
} // namespace torchkv
