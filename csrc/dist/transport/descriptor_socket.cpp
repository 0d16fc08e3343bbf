#include "descriptor_socket.h"

#include <c10/util/Exception.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstring>

namespace torchkv::dist {
namespace {

// Room for more than the one that is expected: what does not fit is closed by
// the system.
constexpr size_t kMaxFiles = 4;

bool set_address(sockaddr_un& address, const std::string& path) {
  address.sun_family = AF_UNIX;
  if (path.size() >= sizeof(address.sun_path)) {
    return false;
  }
  std::copy(path.begin(), path.end(), std::begin(address.sun_path));
  return true;
}

} // namespace

DescriptorSocket::DescriptorSocket(const std::string& path)
    : fd_(socket(AF_UNIX, SOCK_DGRAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0)) {
  sockaddr_un address{};
  const int on = 1;
  // With its messages the system says who has sent them.
  const bool listens = fd_ >= 0 && set_address(address, path) &&
      setsockopt(fd_, SOL_SOCKET, SO_PASSCRED, &on, sizeof(on)) == 0 &&
      bind(fd_, reinterpret_cast<const sockaddr*>(&address), sizeof(address)) ==
          0;
  if (!listens) {
    const int error = errno;
    if (fd_ >= 0) {
      close(fd_);
    }
    TORCH_CHECK(false, "cannot listen at ", path, ": ", std::strerror(error));
  }
}

DescriptorSocket::~DescriptorSocket() {
  close(fd_);
}

int DescriptorSocket::send(
    const std::string& path,
    const std::string& message,
    int file) const {
  sockaddr_un address{};
  if (!set_address(address, path)) {
    return ENAMETOOLONG;
  }
  std::string text = message;
  iovec part{text.data(), text.size()};
  alignas(cmsghdr) std::array<char, CMSG_SPACE(sizeof(int))> control{};
  msghdr header{};
  header.msg_name = &address;
  header.msg_namelen = sizeof(address);
  header.msg_iov = &part;
  header.msg_iovlen = 1;
  header.msg_control = control.data();
  header.msg_controllen = control.size();
  cmsghdr* const rights = CMSG_FIRSTHDR(&header);
  rights->cmsg_level = SOL_SOCKET;
  rights->cmsg_type = SCM_RIGHTS;
  rights->cmsg_len = CMSG_LEN(sizeof(int));
  std::memcpy(CMSG_DATA(rights), &file, sizeof(int));
  ssize_t sent = -1;
  do {
    sent = sendmsg(fd_, &header, MSG_NOSIGNAL);
  } while (sent < 0 && errno == EINTR);
  return sent < 0 ? errno : 0;
}

std::optional<DescriptorSocket::Received> DescriptorSocket::receive() const {
  while (true) {
    std::array<char, kMaxMessage> text{};
    iovec part{text.data(), text.size()};
    alignas(cmsghdr) std::array<
        char,
        CMSG_SPACE(sizeof(ucred)) + CMSG_SPACE(kMaxFiles * sizeof(int))>
        control{};
    msghdr header{};
    header.msg_iov = &part;
    header.msg_iovlen = 1;
    header.msg_control = control.data();
    header.msg_controllen = control.size();
    const ssize_t size = recvmsg(fd_, &header, MSG_CMSG_CLOEXEC);
    if (size < 0 && errno == EINTR) {
      continue;
    }
    if (size < 0) {
      return std::nullopt;
    }
    bool is_own_user = false;
    std::vector<int> files;
    for (cmsghdr* at = CMSG_FIRSTHDR(&header); at != nullptr;
         at = CMSG_NXTHDR(&header, at)) {
      if (at->cmsg_level != SOL_SOCKET) {
        continue;
      }
      if (at->cmsg_type == SCM_CREDENTIALS) {
        ucred sender{};
        std::memcpy(&sender, CMSG_DATA(at), sizeof(sender));
        is_own_user = sender.uid == geteuid();
      } else if (at->cmsg_type == SCM_RIGHTS) {
        files.resize((at->cmsg_len - CMSG_LEN(0)) / sizeof(int));
        std::memcpy(files.data(), CMSG_DATA(at), files.size() * sizeof(int));
      }
    }
    if (is_own_user && files.size() == 1) {
      return Received{
          std::string(text.data(), static_cast<size_t>(size)), files[0]};
    }
    for (const int file : files) {
      close(file);
    }
  }
}

} // namespace torchkv::dist
