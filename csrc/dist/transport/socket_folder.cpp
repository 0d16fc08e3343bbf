#include "socket_folder.h"

#include <c10/util/Exception.h>
#include <dirent.h>
#include <fcntl.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <ctime>
#include <memory>
#include <string_view>
#include <vector>

#include "../../core/text.h"

namespace torchkv::dist {
namespace {

constexpr std::string_view kFolderPrefix = "torchkv-ipc-";
constexpr const char* kLockName = "lock";
constexpr const char* kSocketName = "socket";
constexpr const char* kDescriptorName = "memory"; // not longer
constexpr std::string_view kIpcPrefix = "ipc://";
constexpr size_t kMaxSocketPath = 100; // sockaddr_un has room for 108

// A folder without a lock is being made, or was left at that moment.
constexpr time_t kMakingSeconds = 60;

struct CloseFolder {
  void operator()(DIR* folder) const {
    closedir(folder);
  }
};
using OpenFolder = std::unique_ptr<DIR, CloseFolder>;

void remove_contents(int folder) {
  unlinkat(folder, kSocketName, 0);
  unlinkat(folder, kDescriptorName, 0);
  unlinkat(folder, kLockName, 0);
}

class Descriptor {
 public:
  explicit Descriptor(int number) : number_(number) {}
  Descriptor(const Descriptor&) = delete;
  Descriptor& operator=(const Descriptor&) = delete;
  ~Descriptor() {
    if (number_ >= 0) {
      close(number_);
    }
  }
  int number() const {
    return number_;
  }
  bool is_open() const {
    return number_ >= 0;
  }

 private:
  int number_;
};

bool try_lock(int lock) {
  return flock(lock, LOCK_EX | LOCK_NB) == 0;
}

// Removes the folder if its owner is gone.
void remove_if_left(int base, const char* name) {
  const Descriptor folder(
      openat(base, name, O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC));
  struct stat status{};
  if (!folder.is_open() || fstat(folder.number(), &status) != 0 ||
      status.st_uid != geteuid()) {
    return;
  }
  const Descriptor lock(
      openat(folder.number(), kLockName, O_RDWR | O_CLOEXEC | O_NOFOLLOW));
  const bool left = lock.is_open() ? try_lock(lock.number())
                                   : errno == ENOENT &&
          std::time(nullptr) - status.st_mtime > kMakingSeconds;
  if (left) {
    // Under the lock, see lock_folder.
    remove_contents(folder.number());
    unlinkat(base, name, AT_REMOVEDIR);
  }
}

void remove_left_folders(const std::string& base) {
  const OpenFolder list(opendir(base.c_str()));
  if (list == nullptr) {
    return;
  }
  while (const dirent* entry = readdir(list.get())) {
    const std::string_view name = entry->d_name;
    if (name.substr(0, kFolderPrefix.size()) == kFolderPrefix) {
      remove_if_left(dirfd(list.get()), entry->d_name);
    }
  }
}

// The lock's descriptor, or -1.
int lock_folder(const std::string& path) {
  const std::string name = path + '/' + kLockName;
  const int lock =
      open(name.c_str(), O_RDWR | O_CREAT | O_EXCL | O_CLOEXEC, 0600);
  if (lock < 0) {
    return -1;
  }
  // Another process may take it between the two for one that was left.
  struct stat status{};
  if (!try_lock(lock) || fstat(lock, &status) != 0 || status.st_nlink == 0) {
    close(lock);
    return -1;
  }
  return lock;
}

} // namespace

SocketFolder::SocketFolder() {
  std::vector<std::string> problems;
  for (const char* const variable : {"XDG_RUNTIME_DIR", "TMPDIR", ""}) {
    const char* const value =
        *variable == '\0' ? "/tmp" : std::getenv(variable);
    if (value == nullptr || *value != '/') {
      continue;
    }
    const std::string base = value;
    const std::string pattern =
        base + '/' + std::string(kFolderPrefix) + "XXXXXX";
    if (pattern.size() + 1 + std::strlen(kSocketName) >= kMaxSocketPath) {
      problems.push_back(base + ": too long for a socket");
      continue;
    }
    remove_left_folders(base);
    for (int attempt = 0; attempt < 3 && lock_ < 0; ++attempt) {
      std::string path = pattern;
      if (mkdtemp(path.data()) == nullptr) { // of mode 0700
        problems.push_back(base + ": " + std::strerror(errno));
        break;
      }
      lock_ = lock_folder(path);
      if (lock_ >= 0) {
        path_ = path;
        return;
      }
    }
  }
  TORCH_CHECK(
      false,
      "cannot make a folder for sockets between the processes of this host: ",
      listed(problems));
}

SocketFolder::~SocketFolder() {
  if (lock_ >= 0) {
    close(lock_);
  }
}

std::string SocketFolder::endpoint() const {
  return std::string(kIpcPrefix) + path_ + '/' + kSocketName;
}

std::string SocketFolder::descriptor_path(const std::string& endpoint) {
  const size_t begin = kIpcPrefix.size();
  return endpoint.substr(begin, endpoint.rfind('/') + 1 - begin) +
      kDescriptorName;
}

void SocketFolder::remove() {
  const int folder = open(path_.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC);
  if (folder >= 0) {
    remove_contents(folder);
    close(folder);
    rmdir(path_.c_str());
  }
}

} // namespace torchkv::dist
