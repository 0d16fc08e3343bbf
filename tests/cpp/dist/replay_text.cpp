#include "replay_text.h"

#include <array>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <memory>
#include <stdexcept>
#include <utility>

namespace torchkv::dist::replay {
namespace {

constexpr std::array<std::pair<ErrorCode, const char*>, 14> kCodes{{
    {ErrorCode::kConfig, "config"},
    {ErrorCode::kShape, "shape"},
    {ErrorCode::kUnknown, "unknown"},
    {ErrorCode::kRound, "round"},
    {ErrorCode::kGroup, "group"},
    {ErrorCode::kLeft, "left"},
    {ErrorCode::kNeverPushed, "never_pushed"},
    {ErrorCode::kWorkerLost, "worker_lost"},
    {ErrorCode::kServerLost, "server_lost"},
    {ErrorCode::kExpired, "expired"},
    {ErrorCode::kSuperseded, "superseded"},
    {ErrorCode::kTimeout, "timeout"},
    {ErrorCode::kUpdater, "updater"},
    {ErrorCode::kWrite, "write"},
}};

std::vector<std::string> split_list(const std::string& text) {
  return text == "-" ? std::vector<std::string>() : split(text, ',');
}

template <class Integer>
std::vector<Integer> parse_integers(const std::string& text) {
  std::vector<Integer> result;
  for (const auto& item : split_list(text)) {
    result.push_back(static_cast<Integer>(parse_integer(item)));
  }
  return result;
}

std::optional<Error> parse_error(const std::string& text) {
  if (text == "-") {
    return std::nullopt;
  }
  const auto parts = split(text, ':');
  Error error;
  for (const auto& [code, name] : kCodes) {
    if (parts.at(0) == name) {
      error.code = code;
    }
  }
  error.who = static_cast<int32_t>(parse_integer(parts.at(1)));
  if (parts.at(2) != "-") {
    error.slice = parse_slice(parts.at(2));
  }
  error.text = parts.at(3) == "-" ? "" : parts.at(3);
  error.missing = parse_integers<int32_t>(parts.at(4));
  return error;
}

std::optional<Group> parse_group(const std::string& text) {
  if (text == "-") {
    return std::nullopt;
  }
  const auto parts = split(text, ':');
  return Group{
      parse_slice(parts.at(0)),
      parse_integer(parts.at(1)),
      parse_integer(parts.at(2))};
}

Region parse_region(const std::string& text) {
  const auto parts = split(text, ':');
  const auto at = [&](size_t i) {
    return static_cast<uint64_t>(parse_integer(parts.at(i)));
  };
  return {at(0), at(1), at(2)};
}

// A field that messages have: how it is read and written.
struct MessageField {
  std::function<void(Message&, const std::string&)> read;
  std::function<std::string(const Message&)> write;
};

template <class Get>
MessageField integer(const Get& get) {
  return {
      [get](Message& message, const std::string& text) {
        auto& field = get(message);
        field = static_cast<std::decay_t<decltype(field)>>(parse_integer(text));
      },
      [get](const Message& message) { return std::to_string(get(message)); }};
}

template <class Get>
MessageField integers(const Get& get) {
  return {
      [get](Message& message, const std::string& text) {
        auto& field = get(message);
        using Item = typename std::decay_t<decltype(field)>::value_type;
        field = parse_integers<Item>(text);
      },
      [get](const Message& message) {
        return listed(
            get(message), [](auto item) { return std::to_string(item); });
      }};
}

template <class Get>
MessageField number(const Get& get) {
  return {
      [get](Message& message, const std::string& text) {
        get(message) = parse_number(text);
      },
      [get](const Message& message) { return text_of(get(message)); }};
}

void read_payload(Message& message, const std::string& text) {
  if (text.rfind("at:", 0) == 0) {
    message.region = parse_region(text.substr(3));
  } else {
    message.payload = parse_value(text);
  }
}

std::string write_payload(const Message& message) {
  return message.region ? "at:" + text_of(*message.region)
                        : text_of(std::vector<Blob>{message.payload});
}

MessageField got_field() {
  return {
      [](Message& message, const std::string& text) {
        for (const auto& item : split_list(text)) {
          const auto parts = split(item, '.');
          message.got.emplace_back(
              parse_integer(parts.at(0)),
              static_cast<int32_t>(parse_integer(parts.at(1))));
        }
      },
      [](const Message& message) {
        return listed(message.got, [](const auto& piece) {
          return std::to_string(piece.first) + "." +
              std::to_string(piece.second);
        });
      }};
}

MessageField total_field() {
  return {
      [](Message& message, const std::string& text) {
        const bool is_init = message.kind == Kind::kInit;
        (is_init ? message.spec.total : message.total) = parse_integer(text);
        message.spec.item_bytes = kItemBytes;
      },
      [](const Message& message) {
        return std::to_string(
            message.kind == Kind::kInit ? message.spec.total : message.total);
      }};
}

MessageField counts_field() {
  return {
      [](Message& message, const std::string& text) {
        message.counts = parse_counts(text);
      },
      [](const Message& message) {
        return listed(message.counts, [](const auto& count) {
          return text_of(count.first) + ":" + std::to_string(count.second);
        });
      }};
}

#define FIELD(expression) \
  [](auto& message) -> decltype(auto) { return (message.expression); }

const std::map<std::string, MessageField>& message_fields() {
  static const std::map<std::string, MessageField> fields{
      {"job", integer(FIELD(header.job))},
      {"store", integer(FIELD(header.store))},
      {"rank", integer(FIELD(header.rank))},
      {"server", integer(FIELD(header.server))},
      {"inc", integer(FIELD(header.inc))},
      {"sinc", integer(FIELD(header.sinc))},
      {"committed", integer(FIELD(header.committed))},
      {"floor", integer(FIELD(header.floor))},
      {"phase", integer(FIELD(header.phase))},
      {"digest", integer(FIELD(header.digest))},
      {"opno", integer(FIELD(opno))},
      {"prev", integer(FIELD(prev))},
      {"acked", integer(FIELD(acked))},
      {"pieces", integer(FIELD(pieces))},
      {"index", integer(FIELD(index))},
      {"priority", integer(FIELD(priority))},
      {"gen", integer(FIELD(gen))},
      {"snap", integer(FIELD(snap))},
      {"round", integer(FIELD(round))},
      {"base", integer(FIELD(base))},
      {"min_version", integer(FIELD(min_version))},
      {"retire", integer(FIELD(retire))},
      {"step", integer(FIELD(step))},
      {"version", integer(FIELD(version))},
      {"kid", integer(FIELD(kid))},
      {"age", integer(FIELD(age))},
      {"passed", integer(FIELD(phase))},
      {"by", integer(FIELD(by))},
      {"have", integers(FIELD(have))},
      {"missing", integers(FIELD(missing))},
      {"opnos", integers(FIELD(opnos))},
      {"factor", number(FIELD(factor))},
      {"partial", number(FIELD(partial))},
      {"whole",
       {[](Message& message, const std::string& text) {
          message.spec.whole = text == "1";
        },
        [](const Message& message) {
          return std::string(message.spec.whole ? "1" : "0");
        }}},
      {"slice",
       {[](Message& message, const std::string& text) {
          if (text != "-") {
            message.slice = parse_slice(text);
          }
        },
        [](const Message& message) { return text_of(message.slice); }}},
      {"group",
       {[](Message& message, const std::string& text) {
          message.group = parse_group(text);
        },
        [](const Message& message) { return text_of(message.group); }}},
      {"error",
       {[](Message& message, const std::string& text) {
          message.error = parse_error(text);
        },
        [](const Message& message) { return text_of(message.error); }}},
      {"options",
       {[](Message& message, const std::string& text) {
          message.payload = parse_value(text);
        },
        [](const Message& message) { return options_text(message.payload); }}},
      {"payload", {read_payload, write_payload}},
      {"total", total_field()},
      {"counts", counts_field()},
      {"got", got_field()},
  };
  return fields;
}

#undef FIELD

// The fields of a kind, in the order in which they are written.
const std::vector<std::string>& fields_of(Kind kind) {
  static const auto all = [] {
    const std::string operation =
        "opno slice prev acked pieces index priority gen snap ";
    const std::string push = operation + "total round base group payload";
    const std::map<Kind, std::string> texts{
        {Kind::kHello, ""},
        {Kind::kHeartbeat, "error"},
        {Kind::kFree, "opnos"},
        {Kind::kBye, ""},
        {Kind::kGot, "got"},
        {Kind::kInit, operation + "total whole payload"},
        {Kind::kPush, push},
        {Kind::kPushPull, push + " have"},
        {Kind::kPull, operation + "round min_version have"},
        {Kind::kDelete, operation},
        {Kind::kConfig, operation + "options retire"},
        {Kind::kEnter, operation + "counts"},
        {Kind::kMeet, operation + "counts"},
        {Kind::kSnapshot, operation + "counts step"},
        {Kind::kClose, operation + "counts"},
        {Kind::kNorm, operation + "round group"},
        {Kind::kFactor, operation + "round factor"},
        {Kind::kWelcome, "gen snap passed options"},
        {Kind::kReject, "error"},
        {Kind::kExpired, "by"},
        {Kind::kAlive, "error"},
        {Kind::kFatal, "error"},
        {Kind::kFreed, "opnos"},
        {Kind::kDone, "opno version kid round age passed partial"},
        {Kind::kValue, "opno index pieces payload version kid round"},
        {Kind::kWait, "opno missing"},
        {Kind::kError, "opno error"},
    };
    std::map<Kind, std::vector<std::string>> result;
    for (const auto& [kind_of, text] : texts) {
      for (const auto& field : split(text, ' ')) {
        if (!field.empty()) {
          result[kind_of].push_back(field);
        }
      }
    }
    return result;
  }();
  static const std::vector<std::string> none;
  const auto at = all.find(kind);
  return at == all.end() ? none : at->second;
}

} // namespace

std::vector<std::string> split(std::string_view text, char separator) {
  std::vector<std::string> result;
  for (;;) {
    const size_t end = text.find(separator);
    result.emplace_back(text.substr(0, end));
    if (end == std::string_view::npos) {
      return result;
    }
    text.remove_prefix(end + 1);
  }
}

Fields::Fields(const std::string& text) {
  for (auto& part : split(text, ' ')) {
    const size_t at = part.find('=');
    if (at != std::string::npos) {
      named_[part.substr(0, at)] = part.substr(at + 1);
    } else if (!part.empty()) {
      words_.push_back(std::move(part));
    }
  }
}

const std::string& Fields::word(size_t index) const {
  return words_.at(index);
}

const std::string& Fields::operator[](const std::string& name) const {
  const auto at = named_.find(name);
  if (at == named_.end()) {
    throw std::runtime_error("no field " + name);
  }
  return at->second;
}

int64_t Fields::integer(const std::string& name) const {
  return parse_integer((*this)[name]);
}

double Fields::number(const std::string& name) const {
  return parse_number((*this)[name]);
}

int64_t parse_integer(const std::string& text) {
  size_t end = 0;
  const int64_t result = std::stoll(text, &end);
  if (end != text.size()) {
    throw std::runtime_error("not a number: " + text);
  }
  return result;
}

double parse_number(const std::string& text) {
  return std::strtod(text.c_str(), nullptr);
}

SliceId parse_slice(const std::string& text) {
  const size_t at = text.rfind('/');
  return {
      text.substr(0, at),
      static_cast<int32_t>(parse_integer(text.substr(at + 1)))};
}

Blob parse_value(const std::string& tokens) {
  const auto items = split_list(tokens);
  auto elements = std::make_shared<std::vector<int64_t>>();
  elements->reserve(items.size());
  for (const auto& item : items) {
    elements->push_back(parse_integer(item));
  }
  const void* data = elements->data();
  const size_t size = elements->size() * kItemBytes;
  return {std::move(elements), data, size};
}

Message parse_message(const std::string& text) {
  const Fields fields(text);
  Message message;
  for (int kind = 0; kind < kNumKinds; ++kind) {
    if (fields.word(0) == name(static_cast<Kind>(kind))) {
      message.kind = static_cast<Kind>(kind);
    }
  }
  for (const auto& [field, value] : fields.named()) {
    message_fields().at(field).read(message, value);
  }
  return message;
}

Counts parse_counts(const std::string& text) {
  Counts counts;
  for (const auto& item : split_list(text)) {
    const auto parts = split(item, ':');
    counts.emplace_back(parse_slice(parts.at(0)), parse_integer(parts.at(1)));
  }
  return counts;
}

std::string text_of(double number) {
  std::array<char, 40> text{};
  const int size = std::snprintf(text.data(), text.size(), "%.17g", number);
  return {text.data(), static_cast<size_t>(size)};
}

std::string text_of(const SliceId& slice) {
  return slice.is_server() ? "-" : slice.text();
}

std::string text_of(const Region& region) {
  return std::to_string(region.segment) + ":" + std::to_string(region.offset) +
      ":" + std::to_string(region.size);
}

std::string text_of(const std::optional<Error>& error) {
  if (!error) {
    return "-";
  }
  std::string result;
  for (const auto& [code, name] : kCodes) {
    if (error->code == code) {
      result = name;
    }
  }
  result += ":" + std::to_string(error->who) + ":";
  result += error->slice ? text_of(*error->slice) : "-";
  result += ":" + (error->text.empty() ? "-" : error->text) + ":";
  return result +
      listed(error->missing, [](int32_t rank) { return std::to_string(rank); });
}

std::string text_of(const std::optional<Group>& group) {
  return group ? text_of(group->slice) + ":" + std::to_string(group->kid) +
          ":" + std::to_string(group->round)
               : "-";
}

std::string text_of(const Message& message) {
  const auto& fields = message_fields();
  std::string result = name(message.kind);
  const auto add = [&](const std::string& field) {
    result += " " + field + "=" + fields.at(field).write(message);
  };
  for (const char* field :
       {"job", "store", "rank", "server", "inc", "sinc", "committed"}) {
    add(field);
  }
  // What comes from a worker; a server leaves the digest out.
  if (!is_answer(message.kind) && message.header.floor != 0) {
    for (const char* field : {"floor", "phase", "digest"}) {
      add(field);
    }
  }
  for (const auto& field : fields_of(message.kind)) {
    add(field);
  }
  return result;
}

std::string text_of(c10::ArrayRef<Blob> pieces) {
  std::vector<int64_t> elements;
  for (const auto& piece : pieces) {
    for (size_t at = 0; at + kItemBytes <= piece.size(); at += kItemBytes) {
      int64_t element = 0;
      std::memcpy(&element, piece.data() + at, kItemBytes);
      elements.push_back(element);
    }
  }
  return listed(
      elements, [](int64_t element) { return std::to_string(element); });
}

std::string options_text(const Blob& options) {
  return options.size() == 0 ? "1" : text_of(std::vector<Blob>{options});
}

} // namespace torchkv::dist::replay
