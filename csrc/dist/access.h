#pragma once

#include <string>
#include <vector>

#include "../store/options.h"
#include "transport/zeromq_transport.h"

namespace torchkv::dist {

// Who may connect to a rank of a job whose ranks are on `hosts`: fills in what
// concerns it. On one host nothing listens on TCP. Between hosts, RuntimeError
// without a secret (TORCHKV_JOB_SECRET, or the file TORCHKV_JOB_SECRET_FILE,
// which only its owner may read) unless StoreOptions::security is "none", about
// which it warns. `rendezvous_host` is reached through the interface to use.
// Ranks of one host share memory, unless TORCHKV_SHARED_MEMORY is "0" or the
// system has none, which is a warning.
void set_access(
    ZeromqConfig& config,
    const StoreOptions& options,
    const std::vector<std::string>& hosts,
    const std::string& rendezvous_host);

} // namespace torchkv::dist
