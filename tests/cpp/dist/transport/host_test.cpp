// The addresses of this host and process.
#include "dist/transport/host.h"

#include <c10/util/Exception.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <cstdlib>
#include <string>

#include "../../error_text.h"

namespace torchkv::dist {
namespace {

using ::torchkv::testing::error_text;

class TcpHostTest : public ::testing::Test {
 protected:
  void SetUp() override {
    unsetenv("TORCHKV_INTERFACE");
  }
  void TearDown() override {
    unsetenv("TORCHKV_INTERFACE");
  }
};

TEST_F(TcpHostTest, IsTheAddressFromWhichAnotherIsReached) {
  EXPECT_EQ(tcp_host("127.0.0.1"), "127.0.0.1");
  EXPECT_EQ(tcp_host("127.8.8.8"), "127.0.0.1");
  const std::string local = tcp_host("localhost");
  EXPECT_TRUE(local == "127.0.0.1" || local == "::1") << local;
}

TEST_F(TcpHostTest, TheVariableNamesAnInterfaceOrAnAddress) {
  setenv("TORCHKV_INTERFACE", "lo", 1);
  EXPECT_EQ(tcp_host("nowhere"), "127.0.0.1");
  setenv("TORCHKV_INTERFACE", "127.0.0.1", 1);
  EXPECT_EQ(tcp_host("nowhere"), "127.0.0.1");
}

TEST_F(TcpHostTest, AnotherNameIsAnError) {
  setenv("TORCHKV_INTERFACE", "no-such-thing0", 1);
  const std::string text =
      error_text<c10::Error>([] { tcp_host("localhost"); });
  EXPECT_EQ(
      text.find(
          "TORCHKV_INTERFACE: expected an address of this host or one of "
          "its interfaces ('"),
      0)
      << text;
  EXPECT_NE(text.find("'lo'"), std::string::npos) << text;
  EXPECT_NE(text.find("), but got 'no-such-thing0'"), std::string::npos);
}

TEST_F(TcpHostTest, AHostThatIsNotFoundIsAnError) {
  const std::string text =
      error_text<c10::Error>([] { tcp_host("not a host"); });
  EXPECT_EQ(
      text.find(
          "cannot find the address of this host from which "
          "'not a host' is reached: "),
      0)
      << text;
  EXPECT_NE(text.find("TORCHKV_INTERFACE"), std::string::npos);
}

TEST(OwnProcessTest, IsThisOne) {
  const PeerAddress address = own_process();
  EXPECT_EQ(address.pid, getpid());
  EXPECT_NE(address.started, 0);
  EXPECT_EQ(address.host, own_process().host);
  EXPECT_FALSE(address.host.empty());
  EXPECT_EQ(address.ipc, "");
}

} // namespace
} // namespace torchkv::dist
