#include "text.h"

#include <algorithm>
#include <iomanip>
#include <numeric>
#include <sstream>

namespace torchkv {
namespace {

// The optimal string alignment distance: insertions, deletions, substitutions
// and transpositions of neighbours.
size_t edit_distance(const std::string& a, const std::string& b) {
  std::vector<size_t> before(
      b.size() + 1); // for a's prefix without its last character
  std::vector<size_t> row(b.size() + 1);
  std::iota(row.begin(), row.end(), size_t{0});
  for (size_t i = 1; i <= a.size(); ++i) {
    std::vector<size_t> next(b.size() + 1, i);
    for (size_t j = 1; j <= b.size(); ++j) {
      next[j] = std::min(
          {row[j - 1] + (a[i - 1] == b[j - 1] ? 0 : 1),
           row[j] + 1,
           next[j - 1] + 1});
      if (i > 1 && j > 1 && a[i - 1] == b[j - 2] && a[i - 2] == b[j - 1]) {
        next[j] = std::min(next[j], before[j - 2] + 1);
      }
    }
    before.swap(row);
    row.swap(next);
  }
  return row.back();
}

} // namespace

std::string quoted(const std::string& text) {
  constexpr size_t kShown = 200;
  constexpr size_t kHead = 98; // and kTail and "..." make kShown
  constexpr size_t kTail = 99;
  const auto is_continuation = [](char byte) {
    return (static_cast<unsigned char>(byte) & 0xC0U) == 0x80;
  };
  const auto num_characters = text.size() -
      static_cast<size_t>(std::count_if(
          text.begin(), text.end(), is_continuation));
  std::ostringstream out;
  out << '\'' << std::hex << std::setfill('0');
  size_t character = 0; // index of the one that starts at byte i
  for (size_t i = 0; i < text.size(); ++character) {
    size_t end = i + 1;
    while (end < text.size() && is_continuation(text[end])) {
      ++end;
    }
    const bool is_left_out = num_characters > kShown && character >= kHead &&
        character < num_characters - kTail;
    const auto byte = static_cast<unsigned char>(text[i]);
    if (is_left_out) {
      out << (character == kHead ? "..." : "");
    } else if (byte < 0x20 || byte == 0x7F) {
      out << "\\x" << std::setw(2) << static_cast<int>(byte);
    } else {
      out.write(text.data() + i, static_cast<std::streamsize>(end - i));
    }
    i = end;
  }
  out << '\'';
  return out.str();
}

std::string listed(const std::vector<std::string>& names) {
  std::string result;
  for (const auto& name : names) {
    result += result.empty() ? "'" : ", '";
    result += name + '\'';
  }
  return result;
}

std::string did_you_mean(
    const std::string& text,
    const std::vector<std::string>& candidates) {
  constexpr size_t kLongest = 200; // the time is the product of the sizes
  if (text.size() > kLongest) {
    return {};
  }
  const std::string* nearest = nullptr;
  size_t least = std::max<size_t>(text.size() / 3, 1) + 1;
  for (const auto& candidate : candidates) {
    const auto [shorter, longer] = std::minmax({text.size(), candidate.size()});
    if (longer - shorter >= least || longer == 1) {
      continue; // the distance is not less, or no character is the same
    }
    const size_t distance = edit_distance(text, candidate);
    if (distance < least) {
      least = distance;
      nearest = &candidate;
    }
  }
  return nearest == nullptr ? std::string()
                            : "; did you mean " + quoted(*nearest) + '?';
}

} // namespace torchkv
