#pragma once

#include <cstdint>
#include <string>

#include "../../core/export.h"
#include "transport.h"

namespace torchkv::dist {

// This process, without endpoints.
TORCHKV_API PeerAddress own_process();

// The same in processes that reach each other by loopback addresses.
TORCHKV_API std::string own_network();

// Tells when a process of this host ends, also while a child that it has forked
// keeps its sockets open.
class TORCHKV_API ProcessWatch {
 public:
  // Of a process with the same PeerAddress::host as this one.
  explicit ProcessWatch(const PeerAddress& address);
  ProcessWatch(const ProcessWatch&) = delete;
  ProcessWatch& operator=(const ProcessWatch&) = delete;
  ~ProcessWatch();

  // Readable when the process has ended; -1: unknown, or it had ended before.
  int fd() const {
    return fd_;
  }
  bool has_ended() const;

 private:
  int fd_ = -1;
  bool ended_ = false; // before
};

// An address of this host for endpoints that other hosts reach: that of the
// environment variable TORCHKV_INTERFACE, which is an address or an interface
// ("eth0"), if it is set; else the one from which `towards`, a host name or an
// address, is reached. RuntimeError if there is none.
TORCHKV_API std::string tcp_host(const std::string& towards);

} // namespace torchkv::dist
