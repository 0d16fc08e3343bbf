// What a session does for snapshots and saved states.
#include <c10/util/Exception.h>

#include <future>
#include <memory>
#include <string>
#include <unordered_set>
#include <utility>

#include "errors.h"
#include "node.h"
#include "session.h"
#include "within.h"

namespace torchkv::dist {

Shard Session::held(const char* op, const Keys& keys, double timeout) {
  // Not here: an update that is under way changes the value that it replaces.
  auto collect = [this,
                  wanted = std::unordered_set<Key, KeyHash>(
                      keys.list.begin(), keys.list.end())] {
    Shard shard;
    const std::lock_guard lock(node_->mutex());
    for (const auto& view : server_.slices()) {
      if (wanted.count(view.slice.key) == 0) {
        continue;
      }
      auto shot = std::make_shared<Shot>();
      shot->spec = *view.spec;
      shot->value = view.value;
      shot->version = view.version;
      shot->kid = view.kid;
      shard.slices.emplace_back(view.slice, std::move(shot));
    }
    return shard;
  };
  // Shared, so that it is broken if the applier ends.
  auto done = std::make_shared<std::promise<Shard>>();
  auto result = done->get_future();
  applier_.complete(
      std::move(collect),
      [done = std::exchange(done, nullptr)](
          Shard filled, const std::optional<std::string>& error) {
        if (error) {
          done->set_exception(
              std::make_exception_ptr(std::runtime_error(*error)));
        } else {
          done->set_value(std::move(filled));
        }
      });
  return get_within(result, op, node_->rank(), timeout);
}

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
