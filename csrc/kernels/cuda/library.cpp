#include "library.h"

#include <c10/util/Exception.h>
#include <dlfcn.h>
#include <unistd.h>

#include <array>
#include <atomic>
#include <string>

#include "../../errors.h"

namespace torchkv::kernels::cuda {
namespace {

// Beside the library that this function is in.
std::string path_of_library() {
  Dl_info here;
  TORCHKV_INTERNAL_ASSERT(
      dladdr(reinterpret_cast<void*>(&path_of_library), &here) != 0);
  const std::string path = here.dli_fname;
  return path.substr(0, path.rfind('/') + 1) + "libtorchkv_cuda.so";
}

const Table* load_table() {
  const std::string path = path_of_library();
  // Never closed: kernels may be under way until the process ends.
  void* const library = dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL);
  if (library == nullptr) {
    const char* const problem = dlerror();
    const bool is_there = access(path.c_str(), F_OK) == 0;
    TORCH_CHECK(
        !is_there,
        "torchkv: expected to load its CUDA kernels, but got: ",
        problem);
    return nullptr;
  }
  using GetTable = const Table* (*)();
  const auto get_table =
      reinterpret_cast<GetTable>(dlsym(library, "torchkv_cuda_table"));
  const Table* const table = get_table == nullptr ? nullptr : get_table();
  TORCH_CHECK(
      table != nullptr && table->abi == kAbi,
      "torchkv: expected CUDA kernels of this build in ",
      path,
      ", but got others; build torchkv again");
  return table;
}

// A test's, once it has set one.
std::atomic<bool> is_set{false};
std::atomic<const Table*> table_of_tests{nullptr};

} // namespace

const Table* table() {
  if (is_set) {
    return table_of_tests;
  }
  static const Table* const table = load_table();
  return table;
}

void set_table(const Table* table) {
  table_of_tests = table;
  is_set = true;
}

int num_multiprocessors(c10::Device device) {
  // By device, whose index is an int8; 0 = not asked yet.
  static std::array<std::atomic<int>, 128> known{};
  const int index = static_cast<unsigned char>(device.index());
  std::atomic<int>& kept = known.at(static_cast<size_t>(index));
  int number = kept;
  if (number == 0) {
    check(table()->num_multiprocessors(index, &number));
    kept = number;
  }
  return number;
}

bool is_capturing(c10::Stream stream) {
  const Table* const kernels = table();
  bool result = false;
  if (kernels != nullptr) {
    check(kernels->is_capturing(stream.native_handle(), &result));
  }
  return result;
}

void check(int error) {
  TORCH_CHECK(error == 0, "CUDA error: ", table()->error_string(error));
}

} // namespace torchkv::kernels::cuda
