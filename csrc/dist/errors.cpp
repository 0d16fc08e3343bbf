#include "errors.h"

#include <c10/util/StringUtil.h>
#include <torch/csrc/jit/runtime/jit_exception.h>

#include <utility>

namespace torchkv::dist {
namespace {

// " (key 'w', round 5)"
std::string on_key(const Error& error) {
  if (!error.slice || error.slice->is_server()) {
    return "";
  }
  std::string text = " " + error.slice->key.context();
  if (error.round > 0) {
    text.back() = ',';
    text += c10::str(" round ", error.round, ')');
  }
  return text;
}

// " on rank 1"
std::string on_server(const Error& error) {
  return error.servers.empty() ? "" : " on " + listed_ranks(error.servers);
}

std::string timeout_text(const Error& error, double timeout) {
  std::string waited = error.text;
  if (waited.empty() && !error.missing.empty()) {
    waited = "waited for " + listed_ranks(error.missing);
  } else if (waited.empty()) {
    waited = error.servers.size() > 1
        ? "the servers on " + listed_ranks(error.servers) + " have not answered"
        : "the server" + on_server(error) + " has not answered";
  }
  return c10::str(
      "timed out after ",
      timeout,
      " s; ",
      waited,
      ". The outcome is unknown: do not repeat a push");
}

std::string text_of(const Error& error, int64_t rank, double timeout) {
  const std::string who =
      c10::str("rank ", error.who, error.who == rank ? ", this one," : "");
  switch (error.code) {
    case ErrorCode::kConfig:
      return c10::str(
          who,
          " has created the store with another type, heartbeat, number of "
          "ranks or version of torchkv, or it alone with or without "
          "snapshot_dir");
    case ErrorCode::kShape:
      return c10::str(
          who,
          " has initialized the key with another shape or dtype, or with "
          "another whole= or updater");
    case ErrorCode::kUnknown:
      return c10::str(who, " uses a key that it has not initialized");
    case ErrorCode::kRound:
      return c10::str(who, " has sent a push out of order");
    case ErrorCode::kGroup:
      return c10::str(
          who, " has pushed lists that share keys in another order");
    case ErrorCode::kLeft:
      return c10::str(
          who, " has closed the store, or deleted a key, that others push");
    case ErrorCode::kNeverPushed:
      return c10::str(who, " has pushed the key less often than other ranks");
    case ErrorCode::kWorkerLost:
      return error.who == rank
          ? c10::str("the other ranks have given up rank ", rank, ", this one")
          : c10::str("rank ", error.who, " is lost");
    case ErrorCode::kServerLost:
      return c10::str("the server on rank ", error.who, " is lost");
    case ErrorCode::kExpired:
      return c10::str(
          "the server on rank ", error.who, " has given up rank ", rank);
    case ErrorCode::kSuperseded:
      return c10::str("another process has taken rank ", rank);
    case ErrorCode::kTimeout:
      return timeout_text(error, timeout);
    case ErrorCode::kUpdater:
      return c10::str(
          "the updater", on_server(error), " has raised ", error.text);
    case ErrorCode::kWrite:
      return c10::str(who, " cannot write the snapshot: ", error.text);
    case ErrorCode::kTransfer:
      return c10::str(
          "copying the values from their device has raised ",
          error.text,
          ". Other ranks wait for the push until they time out");
  }
  return "unknown error";
}

} // namespace

std::string listed_ranks(const std::vector<int32_t>& ranks) {
  return c10::str(
      ranks.size() == 1 ? "rank " : "ranks ", c10::Join(", ", ranks));
}

std::string describe(const std::exception& error) {
  if (const auto* script =
          dynamic_cast<const torch::jit::JITException*>(&error)) {
    const auto qualified = script->getPythonClassName();
    const auto message = script->getOriginalMsg();
    if (qualified && message) {
      return qualified->substr(qualified->rfind('.') + 1) + ": " + *message;
    }
  }
  const auto* torch_error = dynamic_cast<const c10::Error*>(&error);
  if (torch_error == nullptr) {
    // Of a Python exception: its type and text, then a stack.
    const std::string text = error.what();
    return text.substr(0, text.find("\n\nAt:"));
  }
  const char* type = "RuntimeError";
  if (dynamic_cast<const c10::ValueError*>(&error) != nullptr) {
    type = "ValueError";
  } else if (dynamic_cast<const c10::TypeError*>(&error) != nullptr) {
    type = "TypeError";
  } else if (dynamic_cast<const c10::IndexError*>(&error) != nullptr) {
    type = "IndexError";
  } else if (dynamic_cast<const c10::NotImplementedError*>(&error) != nullptr) {
    type = "NotImplementedError";
  }
  return c10::str(type, ": ", torch_error->what_without_backtrace());
}

std::optional<std::string> error_of(c10::function_ref<void()> function) {
  try {
    function();
  } catch (const std::exception& error) {
    return describe(error);
  } catch (...) {
    return "an exception of an unknown type";
  }
  return std::nullopt;
}

void throw_error(
    const char* op,
    const Error& error,
    int64_t rank,
    double timeout) {
  if (error.code == ErrorCode::kUnknown && error.who == rank && error.slice) {
    throw_unknown_key(op, error.slice->key); // another thread has deleted it
  }
  const std::string message =
      c10::str(op, ": ", text_of(error, rank, timeout), on_key(error));
  switch (error.code) {
    case ErrorCode::kWorkerLost:
    case ErrorCode::kExpired:
    case ErrorCode::kSuperseded:
      throw WorkerLostError({__func__, __FILE__, __LINE__}, message);
    case ErrorCode::kServerLost:
      throw ServerLostError({__func__, __FILE__, __LINE__}, message);
    case ErrorCode::kTimeout:
      throw StoreTimeoutError({__func__, __FILE__, __LINE__}, message);
    default:
      throw RemoteError({__func__, __FILE__, __LINE__}, message);
  }
}

} // namespace torchkv::dist
