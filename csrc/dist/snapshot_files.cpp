#include "snapshot_files.h"

#include <ATen/ops/empty.h>
#include <c10/util/Exception.h>
#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <cstring>
#include <filesystem>
#include <limits>
#include <utility>

#include "../core/checksum.h"
#include "buffers.h"
#include "bytes.h"
#include "saved_fields.h"

namespace torchkv::dist {
namespace {

namespace fs = std::filesystem;

constexpr auto* kLoad = "create";
constexpr std::string_view kMagic = "torchkv snapshot 2\n";
constexpr std::string_view kAnyMagic = "torchkv snapshot ";
constexpr size_t kKept = 2;
// Shards of which no manifest is seen: on a network's disk one may come late.
constexpr int64_t kFailedKept = 8;

[[noreturn]] void throw_file(const char* what, const std::string& path) {
  TORCH_CHECK(
      false,
      "snapshot: cannot ",
      what,
      " '",
      path,
      "': ",
      std::strerror(errno));
}

class File {
 public:
  // `flags` should have O_CLOEXEC.
  File(const std::string& path, int flags)
      : path_(path), fd_(::open(path.c_str(), flags, 0600)) {
    if (fd_ < 0) {
      throw_file("open", path_);
    }
  }
  File(const File&) = delete;
  File& operator=(const File&) = delete;
  ~File() {
    ::close(fd_);
  }

  void write(const std::byte* data, size_t size) const {
    while (size != 0) {
      const ssize_t count = ::write(fd_, data, size);
      if (count < 0 && errno == EINTR) {
        continue;
      }
      if (count <= 0) {
        throw_file("write", path_);
      }
      data += count;
      size -= static_cast<size_t>(count);
    }
  }
  void sync() const {
    if (::fsync(fd_) != 0) {
      throw_file("flush", path_);
    }
  }

 private:
  const std::string path_;
  const int fd_;
};

// Magic, the blobs, and their CRC-32.
void write_file(const std::string& path, const std::vector<Blob>& blobs) {
  const std::string temporary = path + ".new";
  {
    const File file(temporary, O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC);
    file.write(
        reinterpret_cast<const std::byte*>(kMagic.data()), kMagic.size());
    uint32_t crc = 0;
    for (const auto& blob : blobs) {
      crc = crc32(blob.data(), blob.size(), crc);
      file.write(blob.data(), blob.size());
    }
    file.write(reinterpret_cast<const std::byte*>(&crc), sizeof(crc));
    file.sync();
  }
  if (::rename(temporary.c_str(), path.c_str()) != 0) {
    throw_file("rename", temporary);
  }
  // The new name, too.
  const int flags = O_RDONLY | O_DIRECTORY | O_CLOEXEC;
  File(fs::path(path).parent_path().string(), flags).sync();
}

// What is between; ValueError if the file is damaged, NotImplementedError if
// another version has written it: then the job must not begin anew.
Blob read_file(const std::string& path) {
  std::error_code error;
  const auto size = static_cast<size_t>(fs::file_size(path, error));
  TORCH_CHECK_VALUE(!error, kLoad, ": the snapshot lacks '", path, "'");
  auto text = std::make_shared<std::string>(size, '\0');
  std::FILE* const file = std::fopen(path.c_str(), "rbe");
  const size_t count =
      file == nullptr ? 0 : std::fread(text->data(), 1, size, file);
  if (file != nullptr) {
    std::fclose(file);
  }
  TORCH_CHECK_NOT_IMPLEMENTED(
      text->compare(0, kAnyMagic.size(), kAnyMagic) != 0 ||
          text->compare(0, kMagic.size(), kMagic) == 0,
      kLoad,
      ": the file '",
      path,
      "' has the format of another version of torchkv");
  uint32_t crc = 0;
  const size_t rest = kMagic.size() + sizeof(crc);
  bool is_good = count == size && size >= rest &&
      text->compare(0, kMagic.size(), kMagic) == 0;
  if (is_good) {
    std::memcpy(&crc, text->data() + size - sizeof(crc), sizeof(crc));
    is_good = crc == crc32(text->data() + kMagic.size(), size - rest);
  }
  TORCH_CHECK_VALUE(is_good, kLoad, ": the file '", path, "' is damaged");
  return {text, text->data() + kMagic.size(), size - rest};
}

void write_slice(ByteWriter& out, const SliceId& slice) {
  out.add(slice.key);
  out.add(slice.index);
}

SliceId read_slice(ByteReader& in) {
  SliceId slice;
  slice.key = in.key();
  slice.index = in.number<int32_t>();
  return slice;
}

} // namespace

SnapshotFiles::SnapshotFiles(std::string folder, uint64_t store)
    : folder_(std::move(folder)), store_(std::to_string(store)) {
  std::error_code error;
  fs::create_directories(folder_, error);
  TORCH_CHECK(
      !error,
      "create: cannot make snapshot_dir '",
      folder_,
      "': ",
      error.message());
}

std::string SnapshotFiles::shard_name(
    int64_t number,
    int64_t job,
    int32_t server) const {
  return c10::str(
      folder_, "/shard-", store_, '-', server, '-', number, '-', job);
}

std::string SnapshotFiles::manifest_name(int64_t number) const {
  return c10::str(folder_, "/manifest-", store_, '-', number);
}

void SnapshotFiles::write(const Shard& shard) const {
  ByteWriter out;
  out.add(shard.number);
  out.add(shard.job);
  out.add(shard.server);
  out.add(shard.gen);
  out.add(static_cast<uint64_t>(shard.slices.size()));
  for (const auto& [slice, shot] : shard.slices) {
    write_slice(out, slice);
    write_spec(out, shot->spec);
    out.add(shot->version);
    out.add(shot->gen);
    out.add(shot->kid);
    out.add(shot->value->pieces);
    const auto* stored = dynamic_cast<const StoredValue*>(shot->value.get());
    const bool has_state = stored != nullptr && stored->state;
    out.add(has_state);
    if (has_state) {
      write_state(out, *stored->state);
    }
  }
  out.add(static_cast<uint64_t>(shard.births.size()));
  for (const auto& [slice, kid] : shard.births) {
    write_slice(out, slice);
    out.add(kid);
  }
  out.add(static_cast<uint64_t>(shard.options.size()));
  for (const auto& [gen, options] : shard.options) {
    out.add(gen);
    out.add({options});
  }
  write_file(shard_name(shard.number, shard.job, shard.server), out.take());
}

Shard SnapshotFiles::read(
    const Manifest& manifest,
    int32_t server,
    size_t piece_bytes) const {
  ByteReader in(
      read_file(shard_name(manifest.number, manifest.job, server)), kLoad);
  Shard shard;
  shard.number = in.number<int64_t>();
  shard.job = in.number<int64_t>();
  shard.server = in.number<int32_t>();
  shard.gen = in.number<int64_t>();
  in.check(
      shard.number == manifest.number && shard.job == manifest.job &&
      shard.server == server);
  for (uint64_t i = in.count(); i > 0; --i) {
    SliceId slice = read_slice(in);
    auto shot = std::make_shared<Shot>();
    shot->spec = read_spec(in);
    shot->version = in.number<int64_t>();
    shot->gen = in.number<int64_t>();
    shot->kid = in.number<int64_t>();
    auto value = std::make_shared<StoredValue>();
    value->pieces = cut(in.blob(), piece_bytes);
    if (in.number<bool>()) {
      value->state = read_state(in);
    }
    shot->value = std::move(value);
    shard.slices.emplace_back(std::move(slice), std::move(shot));
  }
  for (uint64_t i = in.count(); i > 0; --i) {
    SliceId slice = read_slice(in);
    shard.births.emplace_back(std::move(slice), in.number<int64_t>());
  }
  for (uint64_t i = in.count(); i > 0; --i) {
    const auto gen = in.number<int64_t>();
    shard.options.emplace_back(gen, in.blob());
  }
  in.end();
  return shard;
}

void SnapshotFiles::write(const Manifest& manifest) const {
  ByteWriter out;
  out.add(manifest.number);
  out.add(manifest.job);
  out.add(manifest.step);
  out.add(manifest.num_servers);
  out.add(static_cast<uint64_t>(manifest.keys.size()));
  for (const auto& [key, spec] : manifest.keys) {
    out.add(key);
    write_spec(out, spec);
  }
  write_file(manifest_name(manifest.number), out.take());
}

std::vector<int64_t> SnapshotFiles::numbers() const {
  const std::string prefix = c10::str("manifest-", store_, '-');
  std::vector<int64_t> result;
  for (const auto& entry : fs::directory_iterator(folder_)) {
    const std::string name = entry.path().filename().string();
    if (name.rfind(prefix, 0) == 0) {
      const char* const text = name.c_str() + prefix.size();
      char* end = nullptr;
      const int64_t number = std::strtoll(text, &end, 10);
      if (end != text && *end == '\0') {
        result.push_back(number);
      }
    }
  }
  std::sort(result.begin(), result.end());
  return result;
}

std::optional<Manifest> SnapshotFiles::latest() const {
  auto found = numbers();
  for (; !found.empty(); found.pop_back()) {
    try {
      ByteReader in(read_file(manifest_name(found.back())), kLoad);
      Manifest manifest;
      manifest.number = in.number<int64_t>();
      manifest.job = in.number<int64_t>();
      manifest.step = in.number<int64_t>();
      manifest.num_servers = in.number<int32_t>();
      for (uint64_t i = in.count(); i > 0; --i) {
        Key key = in.key();
        manifest.keys.emplace_back(std::move(key), read_spec(in));
      }
      in.end();
      return manifest;
    } catch (const c10::ValueError& error) {
      TORCH_WARN(error.what_without_backtrace(), "; the one before is used");
    }
  }
  return std::nullopt;
}

void SnapshotFiles::clean(int32_t server, int64_t current) const {
  const auto found = numbers();
  const int64_t oldest = found.size() < kKept
      ? std::numeric_limits<int64_t>::min()
      : found[found.size() - kKept];
  std::error_code ignored; // another time
  if (server == 0) {
    for (const int64_t number : found) {
      if (number < oldest) {
        fs::remove(manifest_name(number), ignored);
      }
    }
  }
  const std::string prefix = c10::str("shard-", store_, '-', server, '-');
  std::vector<fs::path> old;
  for (const auto& entry : fs::directory_iterator(folder_)) {
    const std::string name = entry.path().filename().string();
    if (name.rfind(prefix, 0) != 0) {
      continue;
    }
    const int64_t number =
        std::strtoll(name.c_str() + prefix.size(), nullptr, 10);
    const bool has_failed = number < current - kFailedKept &&
        !std::binary_search(found.begin(), found.end(), number);
    if (number < oldest || has_failed) {
      old.push_back(entry.path());
    }
  }
  for (const auto& path : old) {
    fs::remove(path, ignored);
  }
}

} // namespace torchkv::dist
