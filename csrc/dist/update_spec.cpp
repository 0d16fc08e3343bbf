#include "update_spec.h"

#include <ATen/ATen.h>

#include <cstring>
#include <map>
#include <string_view>
#include <utility>

#include "../core/plain_dispatch.h"
#include "bytes.h"
#include "protocol/slice.h"

namespace torchkv::dist {
namespace {

constexpr auto* kOp = "set_optimizer";

void write(ByteWriter& out, const Optimizer& optimizer) {
  out.add(std::string_view(optimizer.name()));
  out.add(static_cast<uint64_t>(optimizer.groups.size()));
  for (const auto& rule : optimizer.groups) {
    out.add(numbers_of(rule));
  }
  out.add(shared_numbers(optimizer));
  std::map<SliceId, KeyOptions> sorted; // ranks compare the bytes
  for (const auto& [key, options] : optimizer.keys) {
    sorted.emplace(SliceId{key, 0}, options);
  }
  out.add(static_cast<uint64_t>(sorted.size()));
  for (const auto& [id, options] : sorted) {
    out.add(id.key);
    out.add(static_cast<uint64_t>(options.group));
    out.add(options.lr_mult);
    out.add(options.wd_mult);
  }
}

Optimizer read_optimizer(ByteReader& in) {
  const std::string name(in.text());
  Optimizer optimizer;
  for (uint64_t i = in.count(); i > 0; --i) {
    optimizer.groups.push_back(make_rule(kOp, name, in.numbers()));
  }
  set_shared_numbers(kOp, optimizer, in.numbers());
  for (uint64_t i = in.count(); i > 0; --i) {
    KeyOptions& options = optimizer.keys[in.key()];
    options.group = in.number<uint64_t>();
    options.lr_mult = in.number<double>();
    options.wd_mult = in.number<double>();
  }
  check_optimizer(kOp, optimizer);
  return optimizer;
}

} // namespace

uint64_t history_after(const UpdateSpec& before, const UpdateSpec& spec) {
  ByteWriter out;
  out.add(before.history);
  out.add(static_cast<uint8_t>(spec.kind));
  if (spec.kind == UpdateSpec::Kind::kOptimizer) {
    write(out, *spec.optimizer);
  }
  const Blob bytes = out.take()[0];
  return stable_hash(
      std::string(reinterpret_cast<const char*>(bytes.data()), bytes.size()));
}

Blob encode(const UpdateSpec& spec) {
  ByteWriter out;
  out.add(static_cast<uint8_t>(spec.kind));
  out.add(static_cast<uint8_t>(spec.replaces));
  out.add(spec.epoch);
  out.add(spec.num_calls);
  out.add(spec.history);
  if (spec.kind == UpdateSpec::Kind::kOptimizer) {
    write(out, *spec.optimizer);
  } else if (spec.kind == UpdateSpec::Kind::kScript) {
    out.add(
        std::string_view(
            static_cast<const char*>(spec.archive.const_data_ptr()),
            spec.archive.nbytes()));
  }
  return out.take()[0];
}

UpdateSpec decode_update_spec(const Blob& bytes) {
  UpdateSpec spec;
  if (bytes.size() == 0) {
    return spec;
  }
  ByteReader in(bytes, kOp);
  const auto kind = in.number<uint8_t>();
  in.check(kind <= static_cast<uint8_t>(UpdateSpec::Kind::kPython));
  spec.kind = static_cast<UpdateSpec::Kind>(kind);
  const auto replaces = in.number<uint8_t>();
  in.check(replaces <= 1);
  spec.replaces = replaces == 1;
  spec.epoch = in.number<int64_t>();
  in.check(spec.epoch >= 0);
  spec.num_calls = in.number<int64_t>();
  spec.history = in.number<uint64_t>();
  if (spec.kind == UpdateSpec::Kind::kOptimizer) {
    Optimizer optimizer = read_optimizer(in);
    optimizer.generation = static_cast<uint64_t>(spec.epoch) + 1;
    spec.optimizer = std::make_shared<const Optimizer>(std::move(optimizer));
  } else if (spec.kind == UpdateSpec::Kind::kScript) {
    const std::string_view text = in.text();
    const PlainDispatch plain;
    spec.archive = at::empty({static_cast<int64_t>(text.size())}, at::kByte);
    std::memcpy(spec.archive.data_ptr(), text.data(), text.size());
  }
  in.end();
  return spec;
}

} // namespace torchkv::dist
