// The components of a LocalStore, without the store.
#pragma once

#include <string>

#include "comm/reducer.h"
#include "device/streams.h"
#include "memory/placement.h"
#include "memory/slices.h"

namespace torchkv::testing {

struct Pipeline {
  Pipeline(
      Placement::Policy policy,
      Runtime& runtime,
      const std::string& places = "")
      : streams(runtime),
        slices(streams),
        placement(policy, slices, streams, Places(places)),
        reducer(slices, placement, streams) {}

  Streams streams;
  Slices slices;
  Placement placement;
  Reducer reducer;
};

} // namespace torchkv::testing
