#include "cuda/driver.hpp"

#include <dlfcn.h>

namespace fastcoll {

void* driverAddress(const char* name) noexcept {
  void* const driver = ::dlopen("libcuda.so.1", RTLD_LAZY | RTLD_NOLOAD);
  if (driver == nullptr) return nullptr;
  void* const found = ::dlsym(driver, name);
  ::dlclose(driver);  // drops this reference only; the library stays loaded
  return found;
}

}  // namespace fastcoll
