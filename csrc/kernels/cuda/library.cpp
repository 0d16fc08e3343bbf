#include "library.h"

#include <c10/core/DeviceGuard.h>
#include <c10/util/Exception.h>
#include <dlfcn.h>
#include <unistd.h>

#include <array>
#include <atomic>
#include <string>

#include "../../core/errors.h"

namespace torchkv::kernels::cuda {
namespace {

// In the folder of the library that contains this function.
std::string path_of_library() {
  Dl_info here;
  TORCHKV_INTERNAL_ASSERT(
      dladdr(reinterpret_cast<void*>(&path_of_library), &here) != 0);
  const std::string path = here.dli_fname;
  return path.substr(0, path.rfind('/') + 1) + "libtorchkv_cuda.so";
}

const Table* load_table() {
  const std::string path = path_of_library();
  // Never closed: kernels may run until the process ends.
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
  if (get_table != nullptr && table == nullptr) {
    TORCH_WARN(
        "torchkv: its CUDA kernels were built with a newer major version of "
        "CUDA than the driver supports; PyTorch's operators are used instead. "
        "Build torchkv with PyTorch's version of CUDA, or install a newer "
        "driver.");
    return nullptr;
  }
  TORCH_CHECK(
      table != nullptr && table->abi == kAbi,
      "torchkv: expected CUDA kernels of this build in ",
      path,
      ", but got others; build torchkv again");
  return table;
}

// Of the CUDA driver, which is loaded where PyTorch uses it. Null if it is not.
template <class Function>
Function driver_function(const char* name) {
  void* found = dlsym(RTLD_DEFAULT, name);
  if (found == nullptr) {
    void* const driver = dlopen("libcuda.so.1", RTLD_LAZY | RTLD_NOLOAD);
    found = driver == nullptr ? nullptr : dlsym(driver, name);
  }
  return reinterpret_cast<Function>(found);
}

// Set by tests.
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

namespace {

// Cached properties of a device.
struct Facts {
  std::atomic<int8_t> has_code{-1}; // -1 = unknown
};

// By device, whose index is an int8.
Facts& facts_of(c10::Device device) {
  static std::array<Facts, 128> facts;
  return facts.at(static_cast<unsigned char>(device.index()));
}

} // namespace

void set_table(const Table* table) {
  table_of_tests = table;
  is_set = true;
  for (int i = 0; i < 128; ++i) {
    Facts& facts = facts_of({c10::kCUDA, static_cast<c10::DeviceIndex>(i)});
    facts.has_code = -1;
  }
}

bool has_kernels(c10::Device device) {
  if (!device.is_cuda()) {
    return false;
  }
  const Table* const kernels = table();
  if (kernels == nullptr) {
    return false;
  }
  auto& known = facts_of(device).has_code;
  if (known < 0) {
    const c10::DeviceGuard guard(device);
    bool has_code = false;
    check(kernels->has_code(&has_code));
    known = static_cast<int8_t>(has_code);
  }
  return known != 0;
}

bool is_capturing(c10::Stream stream) {
  const Table* const kernels = table();
  void* const handle = stream.native_handle();
  if (handle == nullptr) {
    return false; // CUDA cannot capture the default stream
  }
  if (kernels == nullptr) {
    static const auto ask =
        driver_function<int (*)(void*, int*)>("cuStreamIsCapturing");
    int status = 0; // CU_STREAM_CAPTURE_STATUS_NONE
    const bool has_answer = ask != nullptr && ask(handle, &status) == 0;
    return has_answer && status != 0;
  }
  const c10::DeviceGuard guard(stream.device());
  bool result = false;
  check(kernels->is_capturing(handle, &result));
  return result;
}

namespace {

constexpr int kRelaxed = 2; // CU_STREAM_CAPTURE_MODE_RELAXED
constexpr int kUnchanged = -1;

// Sets the mode of the calling thread. The one before, or kUnchanged: without
// CUDA, or before its first use, no graph is captured.
int exchange_capture_mode(int mode) {
  using Exchange = int (*)(int*);
  static std::atomic<Exchange> known{nullptr}; // once the driver is loaded
  Exchange exchange = known;
  if (exchange == nullptr) {
    exchange = driver_function<Exchange>("cuThreadExchangeStreamCaptureMode");
    known = exchange;
  }
  return exchange != nullptr && exchange(&mode) == 0 ? mode : kUnchanged;
}

} // namespace

BesideCaptures::BesideCaptures() : before_(exchange_capture_mode(kRelaxed)) {}

BesideCaptures::~BesideCaptures() {
  if (before_ != kUnchanged) {
    exchange_capture_mode(before_);
  }
}

void check(int error) {
  TORCH_CHECK(error == 0, "CUDA error: ", table()->error_string(error));
}

} // namespace torchkv::kernels::cuda
