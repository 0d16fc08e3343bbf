#include "access.h"

#include <c10/util/Exception.h>
#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <string_view>

#include "../core/text.h"
#include "transport/host.h"

namespace torchkv::dist {
namespace {

constexpr size_t kMinSecretBytes = 16;
constexpr mode_t kOthers = 0077; // the rights of group and others

std::string read_secret(const std::string& path) {
  const auto check = [&](bool condition, const char* what) {
    TORCH_CHECK(
        condition,
        "create: TORCHKV_JOB_SECRET_FILE: ",
        what,
        ' ',
        quoted(path));
  };
  const int file = ::open(path.c_str(), O_RDONLY | O_NOFOLLOW | O_CLOEXEC);
  check(file >= 0, std::strerror(errno));
  struct Closer {
    int file;
    ~Closer() {
      ::close(file);
    }
  } const closer{file};
  struct stat status{};
  check(::fstat(file, &status) == 0, std::strerror(errno));
  check(S_ISREG(status.st_mode), "expected a regular file, but got");
  check(
      (status.st_mode & kOthers) == 0 && status.st_uid == ::geteuid(),
      "expected a file that only this user may read (chmod 600), but got");
  std::string secret;
  std::array<char, 4096> buffer{};
  ssize_t count = 0;
  while ((count = ::read(file, buffer.data(), buffer.size())) > 0) {
    secret.append(buffer.data(), static_cast<size_t>(count));
  }
  check(count == 0, "cannot read");
  while (!secret.empty() && (secret.back() == '\n' || secret.back() == '\r')) {
    secret.pop_back();
  }
  return secret;
}

// Empty if there is none.
std::string job_secret() {
  std::string secret;
  if (const char* text = std::getenv("TORCHKV_JOB_SECRET");
      text != nullptr && *text != '\0') {
    secret = text;
  } else if (const char* path = std::getenv("TORCHKV_JOB_SECRET_FILE")) {
    secret = read_secret(path);
  } else {
    return secret;
  }
  TORCH_CHECK(
      secret.size() >= kMinSecretBytes,
      "create: expected a job secret of at least ",
      kMinSecretBytes,
      " bytes, but got ",
      secret.size());
  return secret;
}

// Null: this process does without.
std::shared_ptr<SharedMemory> shared_memory() {
  const char* const setting = std::getenv("TORCHKV_SHARED_MEMORY");
  if (setting != nullptr && std::string_view(setting) == "0") {
    return nullptr;
  }
  try {
    return SharedMemory::create();
  } catch (const c10::Error& error) {
    TORCH_WARN(
        "torchkv: values travel over sockets, as the system has no memory to "
        "share: ",
        error.what_without_backtrace());
    return nullptr;
  }
}

} // namespace

void set_access(
    ZeromqConfig& config,
    const StoreOptions& options,
    const std::vector<std::string>& hosts,
    const std::string& rendezvous_host) {
  const std::string& security = options.security;
  TORCH_CHECK_VALUE(
      security.empty() || security == "curve" || security == "none",
      "create: expected security 'curve' or 'none', but got ",
      quoted(security));
  const auto here = std::count(hosts.begin(), hosts.end(), own_process().host);
  if (here > 1) {
    config.memory = shared_memory();
  }
  if (std::all_of(hosts.begin(), hosts.end(), [&](const std::string& host) {
        return host == hosts[0];
      })) {
    config.security = Security::kIpc;
    return;
  }
  config.tcp_host = tcp_host(rendezvous_host);
  if (security == "none") {
    config.security = Security::kNone;
    TORCH_WARN_ONCE(
        "torchkv: security='none': whoever reaches ",
        config.tcp_host,
        " can read what the ranks exchange, and change it if they read it");
    return;
  }
  config.security = Security::kCurve;
  config.secret = job_secret();
  TORCH_CHECK(
      !config.secret.empty(),
      "create: the ranks are on several hosts, so expected a secret in the "
      "environment variable TORCHKV_JOB_SECRET, or a file with one in "
      "TORCHKV_JOB_SECRET_FILE, the same on all of them; make one by `openssl "
      "rand -hex 32`. On a trusted network, security='none' does without");
}

} // namespace torchkv::dist
