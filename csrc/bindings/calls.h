#pragma once

#include <utility>
#include <vector>

#include "../kvstore.h"
#include "argument_parser.h"

namespace torchkv {

// The methods that read and write values, once for all bindings: parsed with
// the GIL, called without it. Beside what ArgumentParser asks of it, `Objects`
// has
//
//   using Store = ...;                        // a pointer to a KVStore
//   using Int = ...; using Bool = ...;        // of the priority and async_op
//   CallOptions options(op, Int priority, Bool async_op);
//   bool as_bool(op, name, Bool);             // throws for other types
//   int64_t as_int(op, name, Int);            // likewise
//   bool is_none(object);
//   void refuse_tracing(op);                  // throws under a tracer
//   using Released = ...;                     // RAII: without the GIL
//   using Work = ...; Work work(WorkPtr);     // of a null pointer: None
//   Result result(WorkPtr);
//   Result result(std::vector<at::Tensor>, bool single);
template <class Objects>
class Calls {
 public:
  using Object = typename Objects::Object;
  using Store = typename Objects::Store;
  using Int = typename Objects::Int;
  using Bool = typename Objects::Bool;
  using Work = typename Objects::Work;
  using Released = typename Objects::Released;

  static void init(
      const Store& store,
      const Object& key,
      const Object& value,
      const Bool& whole,
      const Bool& share) {
    const Arguments arguments("init", key, value);
    CallOptions options;
    options.whole = Objects::as_bool("init", "whole", whole);
    options.share = Objects::as_bool("init", "share", share);
    [[maybe_unused]] const Released no_gil;
    store->init(arguments.keys, arguments.values, options);
  }

  static void assign(
      const Store& store,
      const Object& key,
      const Object& value,
      const Bool& share) {
    const Arguments arguments("assign", key, value);
    CallOptions options;
    options.share = Objects::as_bool("assign", "share", share);
    [[maybe_unused]] const Released no_gil;
    store->assign(arguments.keys, arguments.values, options);
  }

  static Work push(
      const Store& store,
      const Object& key,
      const Object& value,
      const Int& priority,
      const Bool& async_op) {
    constexpr auto* op = "push";
    const CallOptions options = Objects::options(op, priority, async_op);
    const Arguments arguments(op, key, value);
    [[maybe_unused]] const Released no_gil;
    return Objects::work(
        store->push(arguments.keys, arguments.values, options));
  }

  // Without an out, the values are pulled into.
  static Work pushpull(
      const Store& store,
      const Object& key,
      const Object& value,
      const Object& out,
      const Int& priority,
      const Bool& async_op) {
    constexpr auto* op = "pushpull";
    const CallOptions options = Objects::options(op, priority, async_op);
    const Arguments arguments(op, key, value);
    const Tensors outs = Objects::is_none(out)
        ? arguments.values
        : arguments.parser.tensors(arguments.keys, out, "out");
    [[maybe_unused]] const Released no_gil;
    return Objects::work(
        store->pushpull(arguments.keys, arguments.values, outs, options));
  }

  static Work broadcast(
      const Store& store,
      const Object& key,
      const Object& value,
      const Object& out,
      const Int& priority,
      const Bool& async_op) {
    constexpr auto* op = "broadcast";
    const CallOptions options = Objects::options(op, priority, async_op);
    const Arguments arguments(op, key, value);
    const Tensors outs = arguments.parser.tensors(arguments.keys, out, "out");
    [[maybe_unused]] const Released no_gil;
    return Objects::work(
        store->broadcast(arguments.keys, arguments.values, outs, options));
  }

  static auto pull(
      const Store& store,
      const Object& key,
      const Object& out,
      const Int& priority,
      const Bool& ignore_sparse,
      const Bool& async_op,
      const Int& min_version) {
    constexpr auto* op = "pull";
    Objects::refuse_tracing(op);
    CallOptions options = Objects::options(op, priority, async_op);
    options.ignore_sparse =
        Objects::as_bool(op, "ignore_sparse", ignore_sparse);
    options.min_version = Objects::as_int(op, "min_version", min_version);
    const ArgumentParser<Objects> parser(op);
    const Keys keys = parser.keys(key);
    if (!Objects::is_none(out)) {
      const Tensors outs = parser.tensors(keys, out, "out");
      return Objects::result(
          without_gil([&] { return store->pull(keys, outs, options); }));
    }
    parser.check_sync_without_out(keys, options.async_op);
    return Objects::result(
        without_gil([&] { return store->pull(keys, options); }), keys.single);
  }

  static auto row_sparse_pull(
      const Store& store,
      const Object& key,
      const Object& out,
      const Int& priority,
      const Object& row_ids) {
    constexpr auto* op = "row_sparse_pull";
    Objects::refuse_tracing(op);
    Objects::as_int(op, "priority", priority); // nothing is queued
    const ArgumentParser<Objects> parser(op);
    const Keys keys = parser.keys(key);
    TORCH_CHECK_TYPE(
        !Objects::is_none(row_ids),
        op,
        ": expected row_ids, the numbers of the rows, but got None ",
        keys.context());
    const Tensors ids = parser.tensors(keys, row_ids, "row_ids");
    if (!Objects::is_none(out)) {
      const Tensors outs = parser.tensors(keys, out, "out");
      without_gil([&] { store->row_sparse_pull(keys, ids, outs); });
      return Objects::result(WorkPtr());
    }
    return Objects::result(
        without_gil([&] { return store->row_sparse_pull(keys, ids); }),
        keys.single);
  }

  static void erase(
      const Store& store,
      const Object& key,
      const Object& row_ids) {
    constexpr auto* op = "delete";
    Objects::refuse_tracing(op);
    const ArgumentParser<Objects> parser(op);
    const Keys keys = parser.keys(key);
    if (Objects::is_none(row_ids)) {
      [[maybe_unused]] const Released no_gil;
      store->erase(keys);
      return;
    }
    const Tensors ids = parser.tensors(keys, row_ids, "row_ids");
    [[maybe_unused]] const Released no_gil;
    store->erase_rows(keys, ids);
  }

  static void init_rows(
      const Store& store,
      const Object& key,
      const std::vector<int64_t>& row_shape,
      c10::ScalarType dtype,
      std::optional<int64_t> num_rows,
      const RowInit& init) {
    constexpr auto* op = "init_rows";
    Objects::refuse_tracing(op);
    const Key parsed = ArgumentParser<Objects>(op).key(key);
    [[maybe_unused]] const Released no_gil;
    store->init_rows(parsed, row_shape, dtype, num_rows, init);
  }

  static bool contains(const Store& store, const Object& key) {
    const Key parsed = ArgumentParser<Objects>("in").key(key);
    [[maybe_unused]] const Released no_gil;
    return store->contains(parsed);
  }

  template <class Function>
  static auto without_gil(Function function) {
    [[maybe_unused]] const Released no_gil;
    return function();
  }

 private:
  struct Arguments {
    Arguments(const char* op, const Object& key, const Object& value)
        : parser((Objects::refuse_tracing(op), op)),
          keys(parser.keys(key)),
          values(parser.tensors(keys, value, "value")) {}

    const ArgumentParser<Objects> parser;
    const Keys keys;
    const Tensors values;
  };
};

} // namespace torchkv
