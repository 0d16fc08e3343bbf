#pragma once

#include <string>

#include "../store/options.h"
#include "exchange.h"
#include "transport/zeromq_transport.h"

namespace torchkv::dist {

// ValueError for a security that does not exist.
void check_security(const StoreOptions& options);

// Who may connect to this rank: fills in what concerns it. On one host nothing
// listens on TCP. Between hosts, RuntimeError without a secret
// (TORCHKV_JOB_SECRET, or the file TORCHKV_JOB_SECRET_FILE, which only its
// owner may read) unless StoreOptions::security is "none", about which it
// warns. RuntimeError on all ranks if their securities or secrets differ.
// `rendezvous_host` is reached through the interface to use. Ranks of one host
// share memory, unless TORCHKV_SHARED_MEMORY is "0" or the system has none,
// which is a warning.
//
// Of the secret, the others and whoever reaches the rendezvous see the clients'
// public key. It lets nobody connect, but tells whether a guess of the secret
// is right, as a recorded handshake does. Hence the secret must be random.
void set_access(
    ZeromqConfig& config,
    const StoreOptions& options,
    Exchange& exchange,
    const std::string& rendezvous_host);

} // namespace torchkv::dist
