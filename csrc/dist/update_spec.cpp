#include "update_spec.h"

#include <ATen/ATen.h>
#include <c10/util/Exception.h>

#include <cstring>
#include <map>
#include <string_view>
#include <type_traits>
#include <utility>
#include <vector>

namespace torchkv::dist {
namespace {

// Little endian, as all machines that PyTorch supports.
class SpecWriter {
 public:
  template <class T, class = std::enable_if_t<std::is_arithmetic_v<T>>>
  void add(T number) {
    text_.append(reinterpret_cast<const char*>(&number), sizeof(number));
  }
  void add(std::string_view text) {
    add(static_cast<uint64_t>(text.size()));
    text_.append(text);
  }
  void add(const NumbersByName& numbers) {
    add(static_cast<uint64_t>(numbers.size()));
    for (const auto& [name, number] : numbers) {
      add(std::string_view(name));
      add(number);
    }
  }
  std::string take() {
    return std::move(text_);
  }

 private:
  std::string text_;
};

class SpecReader {
 public:
  explicit SpecReader(const Blob& bytes)
      : rest_(reinterpret_cast<const char*>(bytes.data()), bytes.size()) {}

  template <class T>
  T number() {
    T value;
    std::memcpy(&value, take(sizeof(T)).data(), sizeof(T));
    return value;
  }
  std::string_view text() {
    return take(number<uint64_t>());
  }
  uint64_t count() {
    const auto count = number<uint64_t>();
    check(count <= rest_.size());
    return count;
  }
  NumbersByName numbers() {
    NumbersByName result;
    for (uint64_t i = count(); i > 0; --i) {
      const std::string name(text());
      result[name] = number<double>();
    }
    return result;
  }
  static void check(bool condition) {
    TORCH_CHECK_VALUE(condition, "set_optimizer: received damaged options");
  }
  void end() const {
    check(rest_.empty());
  }

 private:
  std::string_view take(uint64_t size) {
    check(size <= rest_.size());
    const std::string_view result = rest_.substr(0, size);
    rest_.remove_prefix(size);
    return result;
  }

  std::string_view rest_;
};

void write(SpecWriter& out, const Optimizer& optimizer) {
  out.add(std::string_view(optimizer.name()));
  out.add(static_cast<uint64_t>(optimizer.groups.size()));
  for (const auto& rule : optimizer.groups) {
    out.add(numbers_of(rule));
  }
  out.add(numbers_of(optimizer.gradient));
  out.add(static_cast<uint64_t>(optimizer.keys.size()));
  for (const auto& [key, options] : optimizer.keys) {
    const bool is_int = key.kind() == KeyKind::kInt;
    out.add(static_cast<uint8_t>(is_int));
    if (is_int) {
      out.add(key.id());
    } else {
      out.add(std::string_view(key.text()));
    }
    out.add(static_cast<uint64_t>(options.group));
    out.add(options.lr_mult);
    out.add(options.wd_mult);
  }
}

Optimizer read_optimizer(SpecReader& in) {
  constexpr auto* op = "set_optimizer";
  const std::string name(in.text());
  Optimizer optimizer;
  for (uint64_t i = in.count(); i > 0; --i) {
    optimizer.groups.push_back(make_rule(op, name, in.numbers()));
  }
  optimizer.gradient = make_gradient(op, in.numbers());
  for (uint64_t i = in.count(); i > 0; --i) {
    const Key key = in.number<uint8_t>() != 0 ? Key(in.number<int64_t>())
                                              : Key(std::string(in.text()));
    KeyOptions& options = optimizer.keys[key];
    options.group = in.number<uint64_t>();
    options.lr_mult = in.number<double>();
    options.wd_mult = in.number<double>();
  }
  check_optimizer(op, optimizer);
  return optimizer;
}

} // namespace

Blob to_blob(std::string bytes) {
  auto owner = std::make_shared<const std::string>(std::move(bytes));
  return {owner, owner->data(), owner->size()};
}

Blob encode(const UpdateSpec& spec) {
  SpecWriter out;
  out.add(static_cast<uint8_t>(spec.kind));
  out.add(spec.epoch);
  if (spec.kind == UpdateSpec::Kind::kOptimizer) {
    write(out, *spec.optimizer);
  } else if (spec.kind == UpdateSpec::Kind::kScript) {
    out.add(std::string_view(
        static_cast<const char*>(spec.archive.const_data_ptr()),
        spec.archive.nbytes()));
  }
  return to_blob(out.take());
}

UpdateSpec decode_update_spec(const Blob& bytes) {
  UpdateSpec spec;
  if (bytes.size() == 0) {
    return spec;
  }
  SpecReader in(bytes);
  const auto kind = in.number<uint8_t>();
  SpecReader::check(kind <= static_cast<uint8_t>(UpdateSpec::Kind::kPython));
  spec.kind = static_cast<UpdateSpec::Kind>(kind);
  spec.epoch = in.number<int64_t>();
  SpecReader::check(spec.epoch >= 0);
  if (spec.kind == UpdateSpec::Kind::kOptimizer) {
    Optimizer optimizer = read_optimizer(in);
    optimizer.generation = static_cast<uint64_t>(spec.epoch) + 1;
    spec.optimizer = std::make_shared<const Optimizer>(std::move(optimizer));
  } else if (spec.kind == UpdateSpec::Kind::kScript) {
    const std::string_view text = in.text();
    spec.archive =
        at::empty({static_cast<int64_t>(text.size())}, at::kByte);
    std::memcpy(spec.archive.data_ptr(), text.data(), text.size());
  }
  in.end();
  return spec;
}

} // namespace torchkv::dist
