// Functions of the CUDA driver, looked up by name, because this library is built without CUDA.
// torch loads the driver when it first uses a device. On a test device no driver is loaded.
#pragma once

#include <dlfcn.h>

#include <atomic>

namespace fastcoll {

/// A function of the driver, with its type from cuda.h.
template <typename Type>
class DriverFunction;

/// The address of a function of the loaded driver; nullptr without a driver, or without the
/// function.
inline void* driverAddress(const char* name) noexcept {
  void* const driver = ::dlopen("libcuda.so.1", RTLD_LAZY | RTLD_NOLOAD);
  if (driver == nullptr) return nullptr;
  void* const found = ::dlsym(driver, name);
  ::dlclose(driver);  // drops this reference only; the library stays loaded
  return found;
}

template <typename... Arguments>
class DriverFunction<int(Arguments...)> {
 public:
  using Pointer = int (*)(Arguments...);
  constexpr explicit DriverFunction(const char* name) : name(name) {}
  /// nullptr without a driver. Looks the name up again until one is loaded.
  Pointer find() const noexcept {
    void* found = known_.load(std::memory_order_acquire);
    if (found == nullptr) {
      found = driverAddress(name);
      known_.store(found, std::memory_order_release);
    }
    return reinterpret_cast<Pointer>(found);
  }

  const char* const name;

 private:
  mutable std::atomic<void*> known_{nullptr};
};

constexpr int kDriverSuccess = 0;

}  // namespace fastcoll
