#pragma once

#include <optional>
#include <string>

#include "../core/export.h"
#include "../memory/key_state.h"
#include "protocol/round.h"

namespace torchkv::dist {

// A value with what the optimizer keeps for it, as snapshots have it.
struct StoredValue final : Value {
  // Of a value that a snapshot needs, once the value is written again; of a
  // restored one until then.
  std::optional<KeyState> state;
  // Of a row-sparse key: its rows are in the applier's store, and none in
  // `pieces`.
  bool is_live = false;
  // Then: these rows (pack_rows), with `state`.
  Blobs rows;
};

// Snapshots in a folder: a file for each server and, once all of these are
// there, a manifest that joins them. All files are written under another name,
// flushed to the disk and renamed. RuntimeError that names the file where the
// system fails. Thread-safe.
class TORCHKV_API SnapshotFiles {
 public:
  // Makes the folder if it does not exist. `store` tells the files of several
  // stores apart.
  SnapshotFiles(std::string folder, uint64_t store);

  // REQUIRES: the values are StoredValues with a state, or have none.
  void write(const Shard& shard) const;
  void write(const Manifest& manifest) const;
  // Removes what the latest two snapshots do not need, while `current` is under
  // way: manifests on rank 0, of shards those of `server`.
  void clean(int32_t server, int64_t current) const;

  // The latest manifest that is not damaged.
  std::optional<Manifest> latest() const;
  // ValueError if it is missing or damaged.
  Shard read(const Manifest& manifest, int32_t server, size_t piece_bytes)
      const;

 private:
  std::string shard_name(int64_t number, int64_t job, int32_t server) const;
  std::string manifest_name(int64_t number) const;
  std::vector<int64_t> numbers() const; // of manifests, ascending

  const std::string folder_;
  const std::string store_;
};

} // namespace torchkv::dist
