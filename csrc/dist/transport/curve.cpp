#include "curve.h"

#include <c10/util/Exception.h>
#include <dlfcn.h>

#include <array>
#include <cstdint>
#include <string_view>
#include <type_traits>

namespace torchkv::dist::zeromq {
namespace {

using Key = std::array<uint8_t, kKeyBytes>;

// The part of libsodium's C API in use.
// https://doc.libsodium.org
struct Sodium {
  int (*init)();
  int (*hash)(
      uint8_t* out,
      size_t out_size,
      const uint8_t* in,
      unsigned long long in_size,
      const uint8_t* key,
      size_t key_size);
  int (*derive)(
      uint8_t* subkey,
      size_t subkey_size,
      uint64_t number,
      const char* context, // of 8 bytes
      const uint8_t* key);
};

bool find_sodium(void* handle, Sodium& sodium) {
  bool all = true;
  const auto find = [&](auto& function, const char* name) {
    void* const symbol = dlsym(handle, name);
    function = reinterpret_cast<std::decay_t<decltype(function)>>(symbol);
    all = all && symbol != nullptr;
  };
  find(sodium.init, "sodium_init");
  find(sodium.hash, "crypto_generichash");
  find(sodium.derive, "crypto_kdf_derive_from_key");
  return all;
}

// That of libzmq, which searches its dependencies too, else the system's.
Sodium open_sodium() {
  Sodium sodium{};
  bool found = find_sodium(functions().handle, sodium);
  for (const char* name : {"libsodium.so.26", "libsodium.so.23"}) {
    if (!found) {
      void* const handle = dlopen(name, RTLD_NOW | RTLD_LOCAL);
      found = handle != nullptr && find_sodium(handle, sodium);
    }
  }
  TORCH_CHECK(
      found && sodium.init() >= 0,
      "security='curve' needs the library libsodium, which comes with pyzmq: "
      "install it by `pip install 'pyzmq>=27'`");
  return sodium;
}

// Z85, without the NUL.
std::string text_of_key(const Key& key) {
  std::array<char, kKeyText> text{};
  functions().z85_encode(text.data(), key.data(), key.size());
  return text.data();
}

std::string public_key(const std::string& secret_key) {
  std::array<char, kKeyText> text{};
  TORCH_CHECK(
      functions().curve_public(text.data(), secret_key.c_str()) == 0,
      "ZeroMQ: zmq_curve_public failed: ",
      functions().last_error());
  return text.data();
}

} // namespace

CurveKeys derive_curve_keys(const std::string& secret) {
  TORCH_CHECK(
      functions().has("curve") == 1,
      "security='curve' needs a ZeroMQ library with CURVE: install it by "
      "`pip install 'pyzmq>=27'`");
  const Sodium sodium = open_sodium();
  Key master{};
  bool done = sodium.hash(
                  master.data(),
                  master.size(),
                  reinterpret_cast<const uint8_t*>(secret.data()),
                  secret.size(),
                  nullptr,
                  0) == 0;
  const auto derive = [&](uint64_t number) {
    Key key{};
    done = done &&
        sodium.derive(
            key.data(), key.size(), number, "torchkv1", master.data()) == 0;
    return text_of_key(key);
  };
  CurveKeys keys;
  keys.server_secret = derive(1);
  keys.client_secret = derive(2);
  TORCH_CHECK(done, "libsodium cannot derive the keys of security='curve'");
  keys.server_public = public_key(keys.server_secret);
  keys.client_public = public_key(keys.client_secret);
  return keys;
}

Authenticator::Authenticator(Context& context, const std::string& client_public)
    : socket_(context, kRep) {
  Key key{};
  TORCH_CHECK(
      functions().z85_decode(key.data(), client_public.c_str()) != nullptr,
      "expected a key in Z85");
  key_.assign(key.begin(), key.end());
  socket_.set(kLinger, 0);
  socket_.bind("inproc://zeromq.zap.01");
}

void Authenticator::answer() {
  // Version, request, domain, address, identity, mechanism, key.
  constexpr size_t kNumParts = 7;
  const auto part = [](std::string_view text) {
    return Blob(nullptr, text.data(), text.size()); // short: copied at once
  };
  Parts request;
  while (socket_.receive(request, kNumParts)) {
    const bool known = request.size() == kNumParts &&
        text_of(request[5]) == "CURVE" && text_of(request[6]) == key_;
    const std::string_view number =
        request.size() > 1 ? text_of(request[1]) : std::string_view();
    socket_.send(
        {part("1.0"),
         part(number),
         part(known ? "200" : "400"),
         part(known ? "OK" : "unknown key"),
         part(""),
         part("")});
  }
}

} // namespace torchkv::dist::zeromq
