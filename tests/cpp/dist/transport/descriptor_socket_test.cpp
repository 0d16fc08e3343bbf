#include "dist/transport/descriptor_socket.h"

#include <gtest/gtest.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <cstring>
#include <string>

#include "../../error_text.h"
#include "dist/transport/socket_folder.h"

namespace torchkv::dist {
namespace {

using ::torchkv::testing::error_text;

class DescriptorSocketTest : public ::testing::Test {
 protected:
  ~DescriptorSocketTest() override {
    unlink(path("a").c_str());
    unlink(path("b").c_str());
    folder_.remove();
  }
  std::string path(const char* name) const {
    return folder_.path() + '/' + name;
  }
  SocketFolder folder_;
};

TEST_F(DescriptorSocketTest, DescriptorsArriveWithTheirMessages) {
  const DescriptorSocket from(path("a"));
  const DescriptorSocket to(path("b"));
  EXPECT_FALSE(to.receive().has_value());
  std::array<int, 2> ends{};
  ASSERT_EQ(pipe(ends.data()), 0);
  EXPECT_EQ(from.send(path("b"), "read it", ends[0]), 0);
  close(ends[0]);
  const auto received = to.receive(); // at once
  ASSERT_TRUE(received.has_value());
  EXPECT_EQ(received->message, "read it");
  ASSERT_EQ(write(ends[1], "x", 1), 1);
  char letter = 0;
  EXPECT_EQ(read(received->file, &letter, 1), 1);
  EXPECT_EQ(letter, 'x');
  close(ends[1]);
  close(received->file);
  EXPECT_FALSE(to.receive().has_value());
}

TEST_F(DescriptorSocketTest, AFullQueueIsSaidAndNotWaitedFor) {
  const DescriptorSocket from(path("a"));
  const DescriptorSocket to(path("b"));
  int error = 0;
  for (int i = 0; i < 100000 && error == 0; ++i) {
    error = from.send(path("b"), "again", from.fd());
  }
  EXPECT_EQ(error, EAGAIN);
  while (const auto received = to.receive()) {
    close(received->file);
  }
  EXPECT_EQ(from.send(path("b"), "again", from.fd()), 0);
  close(to.receive()->file);
}

TEST_F(DescriptorSocketTest, ErrorsAreTold) {
  const DescriptorSocket from(path("a"));
  EXPECT_EQ(from.send(path("b"), "", from.fd()), ENOENT);
  EXPECT_EQ(from.send(std::string(200, 'x'), "", from.fd()), ENAMETOOLONG);
  EXPECT_NE(
      error_text([&] {
        const DescriptorSocket again(path("a"));
      }).find("cannot listen at"),
      std::string::npos);
}

TEST_F(DescriptorSocketTest, OtherMessagesArePassedOver) {
  const DescriptorSocket from(path("a"));
  const DescriptorSocket to(path("b"));
  sockaddr_un address{};
  address.sun_family = AF_UNIX;
  std::strncpy(
      address.sun_path, path("b").c_str(), sizeof(address.sun_path) - 1);
  ASSERT_EQ(
      sendto(
          from.fd(),
          "no descriptor",
          13,
          0,
          reinterpret_cast<const sockaddr*>(&address),
          sizeof(address)),
      13);
  EXPECT_FALSE(to.receive().has_value());
}

} // namespace
} // namespace torchkv::dist
