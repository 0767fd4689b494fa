#include "base/cores.hpp"

#include <sched.h>

#include <algorithm>
#include <cerrno>
#include <cstdlib>
#include <fstream>
#include <memory>
#include <string>

namespace fastcoll {

CoreSet allowedCores() {
  CoreSet cores;
  // The kernel refuses a set that is smaller than its own (EINVAL), so double the size and retry.
  for (int count = CPU_SETSIZE; count <= 1 << 16; count *= 2) {
    const std::size_t bytes = CPU_ALLOC_SIZE(count);
    const std::unique_ptr<cpu_set_t, void (*)(cpu_set_t*)> set(CPU_ALLOC(count),
                                                               [](cpu_set_t* s) { CPU_FREE(s); });
    if (set == nullptr) break;
    CPU_ZERO_S(bytes, set.get());
    if (::sched_getaffinity(0, bytes, set.get()) == 0) {
      for (int core = 0; core < count; ++core) {
        if (CPU_ISSET_S(core, bytes, set.get())) {
          cores.set(core % cores.size());
        }
      }
      break;
    }
    if (errno != EINVAL) break;
  }
  return cores;
}

int grantedCores() {
  // Control groups v2: "quota period", or "max period".
  std::ifstream file("/sys/fs/cgroup/cpu.max");
  std::string quota;
  double period = 0;
  if (!(file >> quota >> period) || quota == "max" || period <= 0) return 1 << 20;
  const double cores = std::strtod(quota.c_str(), nullptr) / period;
  return std::max(1, static_cast<int>(cores + 0.5));
}

bool hasCoreEach(const CoreSet& own, const std::vector<CoreSet>& ranks, int granted) {
  if (static_cast<std::size_t>(granted) < ranks.size()) return false;
  std::size_t sharing = 0;
  for (const CoreSet& cores : ranks) {
    if (cores.none()) return false;
    if ((cores & own).any()) ++sharing;
  }
  return sharing <= own.count();
}

}  // namespace fastcoll
