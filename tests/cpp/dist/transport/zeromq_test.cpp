// libzmq opened at run time: which file, and what is wrong where that fails.
#include "dist/transport/zeromq.h"

#include <c10/util/Exception.h>
#include <dlfcn.h>
#include <gtest/gtest.h>

#include <cstdio>
#include <cstdlib>
#include <string>
#include <thread>
#include <vector>

#include "../../error_text.h"

namespace torchkv::dist {
namespace {

using ::torchkv::testing::error_text;

bool contains(const std::string& text, const std::string& part) {
  return text.find(part) != std::string::npos;
}

TEST(ZeromqTest, IsOpenedOnce) {
  std::vector<const zeromq::Functions*> found(4);
  std::vector<std::thread> threads;
  for (auto& functions : found) {
    threads.emplace_back([&] { functions = &zeromq::functions(); });
  }
  for (auto& thread : threads) {
    thread.join();
  }
  for (const auto* functions : found) {
    EXPECT_EQ(functions, found[0]);
  }
  int major = 0;
  int minor = 0;
  int patch = 0;
  found[0]->version(&major, &minor, &patch);
  EXPECT_EQ(major, 4);
  EXPECT_GE(minor, 3);
  EXPECT_EQ(found[0]->has("ipc"), 1);
}

TEST(ZeromqTest, AMissingFileIsNamed) {
  const std::string text =
      error_text<c10::Error>([] { zeromq::open("/nowhere/libzmq.so"); });
  EXPECT_TRUE(contains(text, "cannot open '/nowhere/libzmq.so'")) << text;
}

TEST(ZeromqTest, AnotherLibraryIsRefused) {
  const std::string text =
      error_text<c10::Error>([] { zeromq::open("libm.so.6"); });
  EXPECT_EQ(text, "'libm.so.6' has no function 'zmq_version'");
}

// In a new process, which has not opened the library yet.
class ZeromqDeathTest : public ::testing::Test {
 protected:
  void SetUp() override {
    GTEST_FLAG_SET(death_test_style, "threadsafe");
  }
  [[noreturn]] static void report() {
    const std::string text =
        error_text<c10::Error>([] { zeromq::functions(); });
    static_cast<void>(std::fputs(text.c_str(), stderr));
    std::_Exit(7);
  }
};

TEST_F(ZeromqDeathTest, AnUnusableVariableIsAnError) {
  EXPECT_EXIT(
      {
        setenv("TORCHKV_LIBZMQ", "/nowhere/libzmq.so", 1);
        report();
      },
      ::testing::ExitedWithCode(7),
      "TORCHKV_LIBZMQ: cannot open '/nowhere/libzmq.so'.*unset it");
}

TEST_F(ZeromqDeathTest, TheVariableComesFirst) {
  EXPECT_EXIT(
      {
        set_zeromq_library("/nowhere/of_python.so");
        setenv("TORCHKV_LIBZMQ", "libm.so.6", 1);
        report();
      },
      ::testing::ExitedWithCode(7),
      "^TORCHKV_LIBZMQ: 'libm.so.6' has no function 'zmq_version'");
}

TEST_F(ZeromqDeathTest, TheErrorSaysWhatToInstall) {
  // A system's library would be opened.
  void* const system = dlopen("libzmq.so.5", RTLD_LAZY);
  if (system != nullptr) {
    dlclose(system);
    GTEST_SKIP() << "the system has ZeroMQ";
  }
  EXPECT_EXIT(
      {
        unsetenv("TORCHKV_LIBZMQ");
        set_zeromq_library("/nowhere/of_python.so");
        report();
      },
      ::testing::ExitedWithCode(7),
      "pip install 'pyzmq>=27'.*TORCHKV_LIBZMQ.*cannot open "
      "'/nowhere/of_python.so'.*cannot open 'libzmq.so.5'");
}

TEST_F(ZeromqDeathTest, PythonsLibraryIsFound) {
  const char* const path = std::getenv("TORCHKV_LIBZMQ");
  if (path == nullptr) {
    GTEST_SKIP() << "TORCHKV_LIBZMQ is not set";
  }
  EXPECT_EXIT(
      {
        set_zeromq_library(path);
        unsetenv("TORCHKV_LIBZMQ");
        report();
      },
      ::testing::ExitedWithCode(7),
      "^no error$");
}

} // namespace
} // namespace torchkv::dist
