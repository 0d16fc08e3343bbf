#include "host.h"

#include <arpa/inet.h>
#include <c10/util/Exception.h>
#include <ifaddrs.h>
#include <netdb.h>
#include <netinet/in.h>
#include <poll.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <memory>
#include <sstream>
#include <vector>

#include "../../core/text.h"

namespace torchkv::dist {
namespace {

std::string link_target(const char* path) {
  std::array<char, 256> text{};
  const ssize_t size = readlink(path, text.data(), text.size());
  return size < 0 ? "" : std::string(text.data(), static_cast<size_t>(size));
}

std::string host_name() {
  std::array<char, 256> text{};
  gethostname(text.data(), text.size() - 1);
  return text.data();
}

std::string boot_id() {
  std::string id;
  std::ifstream("/proc/sys/kernel/random/boot_id") >> id;
  return id;
}

// When a process began, in ticks since the boot; 0: there is none, or unknown.
uint64_t start_of(int64_t pid) {
  std::ifstream file("/proc/" + std::to_string(pid) + "/stat");
  std::string line;
  std::getline(file, line);
  // The second field is the program's name, in parentheses; the start is the
  // 22nd.
  const size_t end = line.rfind(')');
  if (end == std::string::npos) {
    return 0;
  }
  std::istringstream fields(line.substr(end + 1));
  std::string skipped;
  for (int field = 3; field < 22; ++field) {
    fields >> skipped;
  }
  uint64_t start = 0;
  fields >> start;
  return start;
}

using Addresses = std::unique_ptr<ifaddrs, decltype(&freeifaddrs)>;
using Found = std::unique_ptr<addrinfo, decltype(&freeaddrinfo)>;

// "10.0.0.1"; empty: neither IPv4 nor a global IPv6 address.
std::string text_of_address(const sockaddr* address) {
  if (address == nullptr) {
    return "";
  }
  std::array<char, INET6_ADDRSTRLEN> text{};
  const void* data = nullptr;
  if (address->sa_family == AF_INET) {
    data = &reinterpret_cast<const sockaddr_in*>(address)->sin_addr;
  } else if (address->sa_family == AF_INET6) {
    const auto* six = reinterpret_cast<const sockaddr_in6*>(address);
    if (IN6_IS_ADDR_LINKLOCAL(&six->sin6_addr)) {
      return ""; // means nothing to other hosts
    }
    data = &six->sin6_addr;
  }
  if (data == nullptr ||
      inet_ntop(address->sa_family, data, text.data(), text.size()) ==
          nullptr) {
    return "";
  }
  return text.data();
}

Addresses addresses() {
  ifaddrs* list = nullptr;
  if (getifaddrs(&list) != 0) {
    list = nullptr;
  }
  return {list, &freeifaddrs};
}

std::string address_of_interface(const std::string& name) {
  std::vector<std::string> names;
  std::string six;
  const Addresses list = addresses();
  for (const ifaddrs* entry = list.get(); entry != nullptr;
       entry = entry->ifa_next) {
    const std::string text = text_of_address(entry->ifa_addr);
    if (text.empty()) {
      continue;
    }
    if (name == entry->ifa_name || name == text) {
      if (entry->ifa_addr->sa_family == AF_INET || name == text) {
        return text;
      }
      six = six.empty() ? text : six;
    }
    if (names.empty() || names.back() != entry->ifa_name) {
      names.emplace_back(entry->ifa_name);
    }
  }
  TORCH_CHECK(
      !six.empty(),
      "TORCHKV_INTERFACE: expected an address of this host or one of its "
      "interfaces (",
      listed(names),
      "), but got ",
      quoted(name));
  return six;
}

// A datagram socket's connect() sends nothing: it looks up the route.
std::string address_towards(const addrinfo& target) {
  const int fd = socket(target.ai_family, SOCK_DGRAM | SOCK_CLOEXEC, 0);
  if (fd < 0) {
    return "";
  }
  sockaddr_storage own{};
  socklen_t size = sizeof(own);
  auto* const address = reinterpret_cast<sockaddr*>(&own);
  const bool known = connect(fd, target.ai_addr, target.ai_addrlen) == 0 &&
      getsockname(fd, address, &size) == 0;
  close(fd);
  return known ? text_of_address(address) : "";
}

} // namespace

PeerAddress own_process() {
  PeerAddress address;
  const std::string boot = boot_id();
  address.host = (boot.empty() ? host_name() : boot) + ' ' +
      link_target("/proc/self/ns/pid") + ' ' + link_target("/proc/self/ns/mnt");
  address.pid = getpid();
  address.started = start_of(address.pid);
  return address;
}

std::string own_network() {
  const std::string boot = boot_id();
  return (boot.empty() ? host_name() : boot) + ' ' +
      link_target("/proc/self/ns/net");
}

ProcessWatch::ProcessWatch(const PeerAddress& address) {
  if (address.pid <= 0) {
    return;
  }
#ifdef SYS_pidfd_open
  fd_ = static_cast<int>(
      syscall(SYS_pidfd_open, static_cast<pid_t>(address.pid), 0));
  // Any other error, as of an old kernel, tells nothing.
  ended_ = fd_ < 0 && errno == ESRCH;
  if (fd_ >= 0 && address.started != 0) {
    const uint64_t started = start_of(address.pid);
    // Of a process that has ended but not been waited for, it is the same.
    if (started != 0 && started != address.started) {
      ended_ = true;
      close(fd_);
      fd_ = -1;
    }
  }
#endif
}

ProcessWatch::~ProcessWatch() {
  if (fd_ >= 0) {
    close(fd_);
  }
}

bool ProcessWatch::has_ended() const {
  if (fd_ < 0) {
    return ended_;
  }
  pollfd poll_of{fd_, POLLIN, 0};
  return poll(&poll_of, 1, 0) > 0;
}

std::string tcp_host(const std::string& towards) {
  const char* const named = std::getenv("TORCHKV_INTERFACE");
  if (named != nullptr && *named != '\0') {
    return address_of_interface(named);
  }
  addrinfo hints{};
  hints.ai_socktype = SOCK_DGRAM;
  addrinfo* list = nullptr;
  const int failed = getaddrinfo(towards.c_str(), "1", &hints, &list);
  const Found found(failed == 0 ? list : nullptr, &freeaddrinfo);
  for (const addrinfo* target = found.get(); target != nullptr;
       target = target->ai_next) {
    std::string address = address_towards(*target);
    if (!address.empty()) {
      return address;
    }
  }
  TORCH_CHECK(
      false,
      "cannot find the address of this host from which ",
      quoted(towards),
      " is reached",
      failed == 0 ? "" : std::string(": ") + gai_strerror(failed),
      "; name an interface or an address in the environment variable "
      "TORCHKV_INTERFACE");
}

} // namespace torchkv::dist
