#include "cuda/kernel.hpp"

#include <c10/core/DeviceGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <c10/util/SmallVector.h>

#include <algorithm>
#include <utility>

#include "base/error.hpp"
#include "cuda/driver.hpp"

namespace fastcoll {
namespace {

// From cuda.h.
constexpr int kMaxThreadsPerBlock = 0;
constexpr int kMaxDynamicSharedBytes = 8;
// More dynamic shared memory than this must be allowed for each function.
constexpr unsigned kSharedBytesOfAll = 48 << 10;

const DriverFunction<int(void** context)> ctxGetCurrent("cuCtxGetCurrent");
const DriverFunction<int(void* context)> ctxSetCurrent("cuCtxSetCurrent");
const DriverFunction<int(int* device, int ordinal)> deviceGet("cuDeviceGet");
const DriverFunction<int(void** context, int device)> primaryCtxRetain("cuDevicePrimaryCtxRetain");
const DriverFunction<int(void** module, const void* image)> moduleLoadData("cuModuleLoadData");
const DriverFunction<int(void** function, void* module, const char* name)> moduleGetFunction(
    "cuModuleGetFunction");
const DriverFunction<int(int* value, int attribute, void* function)> funcGetAttribute(
    "cuFuncGetAttribute");
const DriverFunction<int(void* function, int attribute, int value)> funcSetAttribute(
    "cuFuncSetAttribute");
const DriverFunction<int(void* function, unsigned gridX, unsigned gridY, unsigned gridZ,
                         unsigned blockX, unsigned blockY, unsigned blockZ, unsigned sharedBytes,
                         void* stream, void** arguments, void** extra)>
    launchKernel("cuLaunchKernel");
const DriverFunction<int(int status, const char** text)> getErrorName("cuGetErrorName");
const DriverFunction<int(int status, const char** text)> getErrorString("cuGetErrorString");

std::string textOf(int status, const DriverFunction<int(int, const char**)>& get) {
  const char* text = nullptr;
  const auto ask = get.find();
  return ask != nullptr && ask(status, &text) == kDriverSuccess && text != nullptr ? text : "?";
}

/// Calls the driver for a kernel.
class Driver {
 public:
  Driver(const std::string& kernel, c10::Device device) : kernel_(kernel), device_(device) {}

  template <typename... Types, typename... Given>
  void operator()(const DriverFunction<int(Types...)>& function, Given... given) const {
    const auto call = function.find();
    if (call == nullptr) {
      fail(concat("expected a CUDA driver with ", function.name,
                  ", got none. Install the driver of the GPU, or set FASTCOLL_ALGO=nccl."));
    }
    const int status = call(given...);
    if (status == kDriverSuccess) return;
    fail(concat(function.name, " reports ", textOf(status, getErrorName), " (status ", status,
                "): ", textOf(status, getErrorString),
                ". If an earlier kernel failed, set CUDA_LAUNCH_BLOCKING=1 to find it. "
                "Else set FASTCOLL_ALGO=nccl."));
  }

  /// Makes sure that this thread has a context: the CUDA runtime sets one at its first call only.
  void setContext() const {
    void* context = nullptr;
    (*this)(ctxGetCurrent, &context);
    if (context != nullptr) return;
    int device = 0;
    (*this)(deviceGet, &device, static_cast<int>(device_.index()));
    (*this)(primaryCtxRetain, &context, device);
    (*this)(ctxSetCurrent, context);
  }

  [[noreturn]] void fail(const std::string& text) const {
    throw Error(ErrorKind::Backend,
                concat("the kernel ", kernel_, " on ", device_.str(), ": ", text));
  }

 private:
  const std::string& kernel_;
  const c10::Device device_;
};

std::int64_t ceilDiv(std::int64_t count, std::int64_t by) {
  return (count + by - 1) / by;
}

}  // namespace

LoadedKernel::LoadedKernel(c10::Device device, std::string name, const std::string& code,
                           const std::string& entry, unsigned threads, unsigned sharedBytes)
    : device_(device), name_(std::move(name)), threads_(threads), sharedBytes_(sharedBytes) {
  const c10::DeviceGuard onDevice(device_);
  const Driver driver(name_, device_);
  driver.setContext();
  void* module = nullptr;
  driver(moduleLoadData, &module, static_cast<const void*>(code.data()));
  driver(moduleGetFunction, &function_, module, entry.c_str());
  int most = 0;
  driver(funcGetAttribute, &most, kMaxThreadsPerBlock, function_);  // loads code that is lazy
  if (most < static_cast<int>(threads_)) {
    driver.fail(concat("expected a GPU that runs ", threads_,
                       " threads of it in a block, got one for ", most,
                       ". Set FASTCOLL_ALGO=nccl."));
  }
  if (sharedBytes_ > kSharedBytesOfAll) {
    driver(funcSetAttribute, function_, kMaxDynamicSharedBytes, static_cast<int>(sharedBytes_));
  }
}

void LoadedKernel::launch(unsigned programs, const KernelArguments& arguments, void* stream) const {
  // Triton appends two pointers to scratch memory, which these kernels do not use.
  std::uint64_t noScratch = 0;
  c10::SmallVector<void*, 26> addresses;
  for (const std::int64_t& argument : arguments) {
    addresses.push_back(const_cast<std::int64_t*>(&argument));
  }
  addresses.append(2, &noScratch);
  const c10::DeviceGuard onDevice(device_);
  const Driver driver(name_, device_);
  driver.setContext();
  driver(launchKernel, function_, programs, 1u, 1u, threads_, 1u, 1u, sharedBytes_, stream,
         addresses.data(), static_cast<void**>(nullptr));
}

void* LoadedKernel::currentStream() const {
  return c10::impl::VirtualGuardImpl(device_.type()).getStream(device_).native_handle();
}

void Launch::run(void* stream, std::uintptr_t source, std::uintptr_t out, std::int64_t count,
                 std::uintptr_t squares) const {
  KernelArguments given = arguments;
  if (sourceAt >= 0) given[sourceAt] = static_cast<std::int64_t>(source);
  if (outAt >= 0) given[outAt] = static_cast<std::int64_t>(out);
  if (squaresAt >= 0) given[squaresAt] += static_cast<std::int64_t>(squares);
  if (pieces && sourceAt >= 0) given[pieces->at + 1] = count;
  launch(stream, std::move(given));
}

void Launch::launch(void* stream, KernelArguments&& given) const {
  std::int64_t grid = programs;
  if (pieces) {
    const std::int64_t count = given[pieces->at + 1];
    const std::int64_t channels = std::min(pieces->programs, ceilDiv(count, pieces->block));
    const std::int64_t shared = std::max<std::int64_t>(channels, 1) * pieces->grain;
    given[pieces->at] = channels;
    given[pieces->at + 2] = std::min(ceilDiv(count, shared) * pieces->grain, pieces->most);
    grid = channels;
  }
  if (grid != 0) kernel->launch(static_cast<unsigned>(grid), given, stream);
}

}  // namespace fastcoll
