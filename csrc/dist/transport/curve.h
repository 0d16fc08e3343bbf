#pragma once

#include <string>

#include "../../core/export.h"
#include "socket.h"

namespace torchkv::dist::zeromq {

// Keys of CURVE, in Z85: those of all servers of the job, and of all clients.
struct CurveKeys {
  std::string server_public;
  std::string server_secret;
  std::string client_public;
  std::string client_secret;
};

// Derived from the job's secret by libsodium: BLAKE2b-256 of the secret is the
// master key, of which crypto_kdf makes the secret keys 1 (servers) and 2
// (clients) in the context "torchkv1". RuntimeError where libsodium or CURVE is
// missing.
TORCHKV_API CurveKeys derive_curve_keys(const std::string& secret);

// Decides, by the ZeroMQ Authentication Protocol, which clients the sockets of
// a context accept: those that hold the job's client key.
// https://rfc.zeromq.org/spec/27
class Authenticator {
 public:
  // REQUIRES: before any socket of the context accepts connections.
  Authenticator(Context& context, const std::string& client_public);

  Socket& socket() {
    return socket_;
  }
  // Answers what waits.
  void answer();

 private:
  Socket socket_;
  std::string key_; // of 32 bytes
};

} // namespace torchkv::dist::zeromq
