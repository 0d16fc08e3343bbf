#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <string>

#include "../../core/export.h"

namespace torchkv::dist::zeromq {

// The part of libzmq's C API in use: its binary interface has been the same
// since 4.3. The wheel of pyzmq ships the library without its headers.
// https://libzmq.readthedocs.io

// zmq_msg_t
struct alignas(void*) RawMessage {
  std::array<unsigned char, 64> opaque;
};

enum SocketType : int { kPair = 0, kRep = 4, kDealer = 5, kRouter = 6 };

enum Option : int {
  kFd = 14,
  kEvents = 15,
  kLinger = 17, // ms
  kReconnectIvl = 18, // ms
  kReconnectIvlMax = 21, // ms
  kMaxMsgSize = 22, // of a part; int64_t
  kSndHwm = 23,
  kRcvHwm = 24,
  kLastEndpoint = 32,
  kRouterMandatory = 33,
  kTcpKeepalive = 34,
  kTcpKeepaliveCount = 35,
  kTcpKeepaliveIdle = 36, // s
  kTcpKeepaliveInterval = 37, // s
  kIpv6 = 42,
  kCurveServer = 47,
  kCurvePublicKey = 48,
  kCurveSecretKey = 49,
  kCurveServerKey = 50,
  kZapDomain = 55,
  kIpcFilterUid = 59, // uid_t
  kHandshakeIvl = 66, // ms
  kTcpMaxRetransmit = 80, // ms
};
constexpr int kIoThreads = 1; // option of a context

constexpr int kDontWait = 1; // flags of send and recv
constexpr int kSendMore = 2;
constexpr unsigned kPollIn = 1; // bit of kEvents

// Events of a monitor.
constexpr int kClosed = 0x0080; // an attempt to connect has failed
constexpr int kDisconnected = 0x0200;
constexpr int kHandshakeSucceeded = 0x1000;

constexpr size_t kKeyBytes = 32; // of CURVE
constexpr size_t kKeyText = 41; // the same in Z85, with the NUL

struct Functions {
  void* handle = nullptr; // of dlopen

  void (*version)(int* major, int* minor, int* patch);
  int (*error_number)(); // zmq_errno
  const char* (*error_text)(int number); // zmq_strerror
  int (*has)(const char* capability);

  void* (*ctx_new)();
  int (*ctx_set)(void* context, int option, int value);
  int (*ctx_shutdown)(void* context);
  int (*ctx_term)(void* context);

  void* (*socket)(void* context, int type);
  int (*close)(void* socket);
  int (*setsockopt)(void* socket, int option, const void* value, size_t size);
  int (*getsockopt)(void* socket, int option, void* value, size_t* size);
  int (*bind)(void* socket, const char* endpoint);
  int (*connect)(void* socket, const char* endpoint);
  int (*socket_monitor)(void* socket, const char* endpoint, int events);

  int (*msg_init)(RawMessage* message);
  int (*msg_init_size)(RawMessage* message, size_t size);
  int (*msg_init_data)(
      RawMessage* message,
      void* data,
      size_t size,
      void (*release)(void* data, void* hint),
      void* hint);
  int (*msg_send)(RawMessage* message, void* socket, int flags);
  int (*msg_recv)(RawMessage* message, void* socket, int flags);
  int (*msg_close)(RawMessage* message);
  int (*msg_move)(RawMessage* to, RawMessage* from);
  void* (*msg_data)(RawMessage* message);
  size_t (*msg_size)(const RawMessage* message);
  int (*msg_more)(const RawMessage* message);

  int (*curve_keypair)(char* public_key, char* secret_key);
  int (*curve_public)(char* public_key, const char* secret_key);
  char* (*z85_encode)(char* text, const uint8_t* data, size_t size);
  uint8_t* (*z85_decode)(uint8_t* data, const char* text);

  // Of this thread, as text.
  std::string last_error() const {
    return error_text(error_number());
  }
};

// Opens the library on first use and never closes it: TORCHKV_LIBZMQ if that is
// set, else the one of set_zeromq_library, else libzmq.so.5. RuntimeError,
// which says what to install, where that fails; a later call tries again. Any
// thread.
TORCHKV_API const Functions& functions();

// RuntimeError if the library cannot be opened or is too old.
TORCHKV_API Functions open(const std::string& path);

} // namespace torchkv::dist::zeromq

namespace torchkv::dist {

// Where the Python package has found libzmq: in the wheel of pyzmq. Without
// effect after the first use.
TORCHKV_API void set_zeromq_library(std::string path);

} // namespace torchkv::dist
