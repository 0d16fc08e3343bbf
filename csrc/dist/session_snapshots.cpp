// What a session does for snapshots.
#include <c10/util/Exception.h>

#include <utility>

#include "errors.h"
#include "node.h"
#include "session.h"

namespace torchkv::dist {

// A snapshot that fails is not committed; training goes on.
template <class Core>
void Session::written(
    Core& core,
    int64_t number,
    const std::optional<std::string>& error) {
  if (error) {
    TORCH_WARN("torchkv: a snapshot is not written: ", *error);
  }
  const std::lock_guard lock(node_->mutex());
  core.on_written(number, error, node_->now());
  perform(core.take());
  node_->deliver();
}

void Session::perform_one(WriteShard& action) {
  applier_.complete(
      std::move(action.shard),
      [this](Shard shard, std::optional<std::string> error) {
        const int64_t number = shard.number;
        if (!error) {
          error = error_of([&] {
            const Blob& options = shard.options.back().second;
            if (decode_update_spec(options).kind == UpdateSpec::Kind::kScript) {
              applier_.updates().check_script_is_stateless();
            }
          });
        }
        if (error) {
          written(server_, number, error);
          return;
        }
        writer_.run([this, number, shard = std::move(shard)] {
          written(server_, number, error_of([&] {
                    TORCHKV_INTERNAL_ASSERT(files_ != nullptr);
                    files_->write(shard);
                    files_->clean(node_->rank(), number);
                  }));
        });
      });
}

void Session::perform_one(WriteManifest& action) {
  writer_.run([this, manifest = std::move(action.manifest)] {
    written(worker_, manifest.number, error_of([&] {
              TORCHKV_INTERNAL_ASSERT(files_ != nullptr);
              files_->write(manifest);
            }));
  });
}

} // namespace torchkv::dist
