#pragma once

#include <cstddef>
#include <optional>
#include <string>
#include <vector>

#include "../../core/export.h"

namespace torchkv::dist {

// Takes file descriptors of other processes of this user on this host, each
// with a message. Never blocks.
class TORCHKV_API DescriptorSocket {
 public:
  struct Received {
    std::string message;
    int file = -1; // the caller's
  };

  // Listens at a path, which may not exist. RuntimeError if it cannot.
  explicit DescriptorSocket(const std::string& path);
  DescriptorSocket(const DescriptorSocket&) = delete;
  DescriptorSocket& operator=(const DescriptorSocket&) = delete;
  ~DescriptorSocket();

  // Readable when something has come.
  int fd() const {
    return fd_;
  }
  // To the socket at a path; an errno, 0 for success. EAGAIN: later, perhaps.
  // Once sent, it is the next receive() there that has it.
  int send(const std::string& path, const std::string& message, int file) const;
  // The next that a process of this user has sent.
  std::optional<Received> receive() const;

  static constexpr size_t kMaxMessage = 128;

 private:
  int fd_ = -1;
};

} // namespace torchkv::dist
