#pragma once

#include <string>

#include "../../core/export.h"

namespace torchkv::dist {

// A fresh folder for the socket of this process, which only its user can enter:
// below XDG_RUNTIME_DIR, TMPDIR or /tmp, where it fits into the address of a
// socket. It is locked as long as this process lives, so that a later one can
// tell and remove what a crash has left.
class TORCHKV_API SocketFolder {
 public:
  SocketFolder();
  SocketFolder(const SocketFolder&) = delete;
  SocketFolder& operator=(const SocketFolder&) = delete;
  // Leaves the folder to its later finder.
  ~SocketFolder();

  const std::string& path() const {
    return path_;
  }
  std::string endpoint() const;
  // For the DescriptorSocket of the process that has such an endpoint.
  static std::string descriptor_path(const std::string& endpoint);

  void remove();

 private:
  std::string path_;
  int lock_ = -1;
};

} // namespace torchkv::dist
