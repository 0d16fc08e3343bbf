// The lines of tests/dist/traces.py.
#pragma once

#include <c10/util/ArrayRef.h>

#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "dist/protocol/action.h"

namespace torchkv::dist::replay {

constexpr size_t kItemBytes = 8;

std::vector<std::string> split(std::string_view text, char separator);

// The fields of a text: "A B name=value".
class Fields {
 public:
  explicit Fields(const std::string& text);
  // The text's `index`-th word without a name.
  const std::string& word(size_t index) const;
  // Throws if there is none.
  const std::string& operator[](const std::string& name) const;
  int64_t integer(const std::string& name) const;
  double number(const std::string& name) const;
  const std::map<std::string, std::string>& named() const {
    return named_;
  }

 private:
  std::vector<std::string> words_;
  std::map<std::string, std::string> named_;
};

int64_t parse_integer(const std::string& text);
double parse_number(const std::string& text);
SliceId parse_slice(const std::string& text);
Blob parse_value(const std::string& tokens); // "1,2"; "-": empty
Message parse_message(const std::string& text);
Counts parse_counts(const std::string& text);

std::string text_of(double number);
std::string text_of(const SliceId& slice);
std::string text_of(const Region& region);
std::string text_of(const std::optional<Error>& error);
std::string text_of(const std::optional<Group>& group);
std::string text_of(const Message& message);
// The elements of a value in pieces.
std::string text_of(c10::ArrayRef<Blob> pieces);
// The one element of rank 0's options; 1 before there are any.
std::string options_text(const Blob& options);

// "-" if there is none, else with commas.
template <class Items, class Text>
std::string listed(const Items& items, const Text& text) {
  std::string result;
  for (const auto& item : items) {
    if (!result.empty()) {
      result += ',';
    }
    result += text(item);
  }
  return result.empty() ? "-" : result;
}

} // namespace torchkv::dist::replay
