#include "available_memory.h"

#include <algorithm>
#include <cstdint>
#include <fstream>
#include <limits>
#include <string>

namespace torchkv::dist {
namespace {

constexpr size_t kUnlimited = std::numeric_limits<size_t>::max();

size_t system_memory(const std::string& root) {
  std::ifstream file(root + "/proc/meminfo");
  std::string name;
  size_t kilobytes = 0;
  std::string rest;
  while (file >> name >> kilobytes && std::getline(file, rest)) {
    if (name == "MemAvailable:") {
      return kilobytes * 1024;
    }
  }
  return kUnlimited;
}

// The number in a file; `missing` where there is none, as "max" is none.
size_t number_in(const std::string& path, size_t missing) {
  std::ifstream file(path);
  size_t number = 0;
  return file >> number ? number : missing;
}

// Of a group, with what it would give back: file contents that were read once.
size_t left_in(
    const std::string& folder,
    const char* limit,
    const char* used,
    const char* reclaimable) {
  const size_t most = number_in(folder + limit, kUnlimited);
  if (most == kUnlimited) {
    return kUnlimited;
  }
  size_t now = number_in(folder + used, 0);
  std::ifstream statistics(folder + "/memory.stat");
  std::string name;
  size_t number = 0;
  while (statistics >> name >> number) {
    if (name == reclaimable) {
      now -= std::min(now, number);
    }
  }
  return most - std::min(most, now);
}

} // namespace

size_t available_memory(const std::string& root) {
  size_t available = system_memory(root);
  const std::string all_groups = root + "/sys/fs/cgroup";
  // "<number>:<controllers>:<path>"; a container sees its own as the root.
  std::ifstream groups(root + "/proc/self/cgroup");
  std::string line;
  while (std::getline(groups, line)) {
    const size_t first = line.find(':');
    const size_t second = line.find(':', first + 1);
    if (second == std::string::npos) {
      continue;
    }
    const std::string controllers = line.substr(first + 1, second - first - 1);
    std::string path = line.substr(second + 1);
    while (true) {
      path = path == "/" ? "" : path;
      if (controllers.empty()) {
        available = std::min(
            available,
            left_in(
                all_groups + path,
                "/memory.max",
                "/memory.current",
                "inactive_file"));
      } else if (controllers == "memory") {
        available = std::min(
            available,
            left_in(
                std::string(all_groups).append("/memory").append(path),
                "/memory.limit_in_bytes",
                "/memory.usage_in_bytes",
                "total_inactive_file"));
      }
      if (path.empty()) {
        break;
      }
      path.resize(path.rfind('/')); // the groups that contain it limit it, too
    }
  }
  return available;
}

} // namespace torchkv::dist
