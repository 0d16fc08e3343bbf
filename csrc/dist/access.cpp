#include "access.h"

#include <c10/util/Exception.h>
#include <c10/util/StringUtil.h>
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
#include <utility>
#include <vector>

#include "../core/text.h"
#include "errors.h"
#include "transport/curve.h"
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

// As job_secret, but it is an error if there is none.
std::string required_secret() {
  std::string secret = job_secret();
  TORCH_CHECK(
      !secret.empty(),
      "create: the ranks are on several hosts, so expected a secret in the "
      "environment variable TORCHKV_JOB_SECRET, or a file with one in "
      "TORCHKV_JOB_SECRET_FILE, the same on all of them; make one by `openssl "
      "rand -hex 32`. On a trusted network, security='none' does without");
  return secret;
}

// What the ranks say, and who says it, in order of the first that does.
using Said = std::vector<std::pair<std::string, std::vector<int32_t>>>;

Said who_says_what(const std::vector<std::string>& values) {
  Said said;
  for (size_t rank = 0; rank < values.size(); ++rank) {
    auto found = std::find_if(said.begin(), said.end(), [&](const auto& one) {
      return one.first == values[rank];
    });
    if (found == said.end()) {
      found = said.insert(found, {values[rank], {}});
    }
    found->second.push_back(static_cast<int32_t>(rank));
  }
  return said;
}

void check_same_security(const std::vector<std::string>& securities) {
  const Said said = who_says_what(securities);
  std::vector<std::string> parts;
  for (const auto& [security, ranks] : said) {
    parts.push_back(quoted(security) + " on " + listed_ranks(ranks));
  }
  TORCH_CHECK(
      said.size() == 1,
      "create: expected the same security on all ranks, but got ",
      c10::Join(" and ", parts));
}

void check_same_secret(const std::vector<std::string>& public_keys) {
  const Said said = who_says_what(public_keys);
  std::vector<std::string> parts;
  const char* next = "one on ";
  for (const auto& [key, ranks] : said) {
    parts.push_back(
        (key.empty() ? "none on " : std::exchange(next, "another on ")) +
        listed_ranks(ranks));
  }
  TORCH_CHECK(
      said.size() == 1,
      "create: expected the same job secret (TORCHKV_JOB_SECRET, or the file "
      "TORCHKV_JOB_SECRET_FILE) on all ranks, but the secrets differ: ",
      c10::Join("; ", parts));
}

// A loopback address reaches the ranks of its own network only.
void check_reachable(
    const std::vector<std::string>& networks,
    const std::vector<std::string>& tcp_hosts,
    const std::string& rendezvous_host) {
  const bool is_one = who_says_what(networks).size() == 1;
  for (size_t rank = 0; rank < tcp_hosts.size(); ++rank) {
    const std::string& host = tcp_hosts[rank];
    const bool is_loopback = host.rfind("127.", 0) == 0 || host == "::1";
    TORCH_CHECK(
        !host.empty() && (is_one || !is_loopback),
        "create: expected an address of rank ",
        rank,
        " that the ranks on other hosts reach, but got ",
        host.empty() ? "none" : host,
        ", towards ",
        quoted(rendezvous_host),
        "; name an interface or an address in the environment variable "
        "TORCHKV_INTERFACE");
  }
}

} // namespace

void check_security(const StoreOptions& options) {
  const std::string& security = options.security;
  TORCH_CHECK_VALUE(
      security.empty() || security == "curve" || security == "none",
      "create: expected security 'curve' or 'none', but got ",
      quoted(security));
}

void set_access(
    ZeromqConfig& config,
    const StoreOptions& options,
    Exchange& exchange,
    const std::string& rendezvous_host) {
  const std::string& security = options.security;
  const auto hosts = exchange.all("host", own_process().host);
  const auto here = std::count(hosts.begin(), hosts.end(), own_process().host);
  if (here > 1) {
    config.memory = shared_memory();
  }
  const auto securities =
      exchange.all("security", security.empty() ? "curve" : security);
  // Every rank refuses, or none.
  const auto refuse_unless = [&](auto&& check) {
    try {
      check();
    } catch (...) {
      exchange.refuse();
      throw;
    }
  };
  refuse_unless([&] { check_same_security(securities); });
  if (std::all_of(hosts.begin(), hosts.end(), [&](const std::string& host) {
        return host == hosts[0];
      })) {
    config.security = Security::kIpc;
    return;
  }
  refuse_unless([&] {
    constexpr auto* name = "tcp host";
    const auto networks = exchange.all("network", own_network());
    try {
      config.tcp_host = tcp_host(rendezvous_host);
    } catch (...) {
      exchange.say(name, "");
      throw;
    }
    check_reachable(
        networks, exchange.all(name, config.tcp_host), rendezvous_host);
  });
  if (security == "none") {
    config.security = Security::kNone;
    TORCH_WARN_ONCE(
        "torchkv: security='none': whoever reaches ",
        config.tcp_host,
        " can read what the ranks exchange, and change it if they read it");
    return;
  }
  config.security = Security::kCurve;
  constexpr auto* name = "public key";
  std::string public_key;
  refuse_unless([&] {
    try {
      config.secret = required_secret();
      public_key = zeromq::derive_curve_keys(config.secret).client_public;
    } catch (...) {
      exchange.say(name, "");
      throw;
    }
  });
  const auto public_keys = exchange.all(name, public_key);
  refuse_unless([&] { check_same_secret(public_keys); });
}

} // namespace torchkv::dist
