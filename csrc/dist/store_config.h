#pragma once

#include <cstdint>
#include <string>

#include "../store/options.h"
#include "node.h"
#include "protocol/config.h"

namespace torchkv::dist {

// Seconds after which a store's calls fail. ValueError if it is not positive,
// or greater than 1e9.
double timeout_of(const StoreOptions& options);

// All but the number of the store. ValueError for a wrong heartbeat.
Config config_of(
    const Node& node,
    const std::string& type,
    const Policy& policy,
    const StoreOptions& options,
    double timeout);

} // namespace torchkv::dist
