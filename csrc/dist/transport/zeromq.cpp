#include "zeromq.h"

#include <c10/util/Exception.h>
#include <c10/util/StringUtil.h>
#include <dlfcn.h>

#include <atomic>
#include <cstdlib>
#include <mutex>
#include <type_traits>
#include <utility>

#include "../../core/text.h"

namespace torchkv::dist::zeromq {
namespace {

struct Library {
  std::mutex mutex; // guards `path` and the loading
  std::string path; // of set_zeromq_library
  std::atomic<const Functions*> loaded{nullptr};
};

Library& library() {
  static auto* library = new Library(); // never freed: any thread may use it
  return *library;
}

// Another libzmq that is visible everywhere, such as a preloaded one, would
// take over calls of ours within itself. The address sanitizer does not support
// RTLD_DEEPBIND, hence only then.
int open_flags() {
  const bool other = dlsym(RTLD_DEFAULT, "zmq_version") != nullptr;
  return RTLD_NOW | RTLD_LOCAL | (other ? RTLD_DEEPBIND : 0);
}

constexpr const char* kInstall =
    "install it by `pip install 'pyzmq>=27'`, or name the file in the "
    "environment variable TORCHKV_LIBZMQ";

Functions find_library() {
  const char* const named = std::getenv("TORCHKV_LIBZMQ");
  if (named != nullptr && *named != '\0') {
    try {
      return open(named);
    } catch (const c10::Error& error) {
      TORCH_CHECK(
          false,
          "TORCHKV_LIBZMQ: ",
          error.what_without_backtrace(),
          "; unset it to use the library of pyzmq");
    }
  }
  std::string problems;
  for (const auto& path : {library().path, std::string("libzmq.so.5")}) {
    if (path.empty()) {
      continue;
    }
    try {
      return open(path);
    } catch (const c10::Error& error) {
      problems += c10::str("; ", error.what_without_backtrace());
    }
  }
  TORCH_CHECK(
      false,
      "stores of several processes need the library ZeroMQ (libzmq) 4.3 or "
      "newer: ",
      kInstall,
      problems);
}

} // namespace

Functions open(const std::string& path) {
  void* const handle = dlopen(path.c_str(), open_flags());
  if (handle == nullptr) {
    const char* const problem = dlerror();
    TORCH_CHECK(
        false,
        "cannot open ",
        quoted(path),
        ": ",
        problem == nullptr ? "unknown error" : problem);
  }
  Functions found{};
  found.handle = handle;
  std::string missing;
  const auto find = [&](auto& function, const char* name) {
    void* const symbol = dlsym(handle, name);
    function = reinterpret_cast<std::decay_t<decltype(function)>>(symbol);
    if (symbol == nullptr && missing.empty()) {
      missing = name;
    }
  };
  find(found.version, "zmq_version");
  find(found.error_number, "zmq_errno");
  find(found.error_text, "zmq_strerror");
  find(found.has, "zmq_has");
  find(found.ctx_new, "zmq_ctx_new");
  find(found.ctx_set, "zmq_ctx_set");
  find(found.ctx_shutdown, "zmq_ctx_shutdown");
  find(found.ctx_term, "zmq_ctx_term");
  find(found.socket, "zmq_socket");
  find(found.close, "zmq_close");
  find(found.setsockopt, "zmq_setsockopt");
  find(found.getsockopt, "zmq_getsockopt");
  find(found.bind, "zmq_bind");
  find(found.connect, "zmq_connect");
  find(found.socket_monitor, "zmq_socket_monitor");
  find(found.msg_init, "zmq_msg_init");
  find(found.msg_init_size, "zmq_msg_init_size");
  find(found.msg_init_data, "zmq_msg_init_data");
  find(found.msg_send, "zmq_msg_send");
  find(found.msg_recv, "zmq_msg_recv");
  find(found.msg_close, "zmq_msg_close");
  find(found.msg_move, "zmq_msg_move");
  find(found.msg_data, "zmq_msg_data");
  find(found.msg_size, "zmq_msg_size");
  find(found.msg_more, "zmq_msg_more");
  find(found.curve_keypair, "zmq_curve_keypair");
  find(found.curve_public, "zmq_curve_public");
  find(found.z85_encode, "zmq_z85_encode");
  find(found.z85_decode, "zmq_z85_decode");
  int major = 0;
  int minor = 0;
  int patch = 0;
  if (found.version != nullptr) {
    found.version(&major, &minor, &patch);
  }
  // 4.3: events of handshakes. A new major version may change types.
  const bool fits = missing.empty() && major == 4 && minor >= 3;
  if (!fits) {
    dlclose(handle); // nothing of it has run, but for zmq_version
  }
  TORCH_CHECK(
      missing.empty(), quoted(path), " has no function '", missing, "'");
  TORCH_CHECK(
      fits,
      quoted(path),
      " is ZeroMQ ",
      major,
      ".",
      minor,
      ".",
      patch,
      ", but expected 4.3 or newer of 4.x");
  return found;
}

const Functions& functions() {
  Library& known = library();
  if (const Functions* const loaded = known.loaded) {
    return *loaded;
  }
  const std::lock_guard lock(known.mutex);
  if (known.loaded == nullptr) {
    known.loaded = new Functions(find_library()); // never freed
  }
  return *known.loaded;
}

} // namespace torchkv::dist::zeromq

namespace torchkv::dist {

void set_zeromq_library(std::string path) {
  zeromq::Library& known = zeromq::library();
  const std::lock_guard lock(known.mutex);
  known.path = std::move(path);
}

} // namespace torchkv::dist
