#include "base/cores.hpp"

#include <sched.h>

#include <algorithm>
#include <atomic>
#include <cstdlib>
#include <fstream>
#include <string>

namespace fastcoll {

CoreSet allowedCores() {
  CoreSet cores;
  cpu_set_t sets[64];  // the kernel refuses a set that is smaller than its own
  if (::sched_getaffinity(0, sizeof sets, sets) != 0) return cores;
  for (std::size_t core = 0; core < 8 * sizeof sets; ++core) {
    if (CPU_ISSET_S(core, sizeof sets, sets)) cores.set(core % cores.size());
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

int coresEach(const CoreSet& own, const std::vector<CoreSet>& ranks, int granted) {
  std::size_t sharing = 0;
  for (const CoreSet& cores : ranks) {
    if (cores.none()) return 0;
    if ((cores & own).any()) ++sharing;
  }
  if (sharing == 0) return 0;
  return static_cast<int>(std::min(own.count() / sharing, granted / ranks.size()));
}

int coresOfProcess(int found) {
  static std::atomic<int> least{1 << 20};
  const char* const text = std::getenv("LOCAL_WORLD_SIZE");
  const int ranks = std::max(1, text == nullptr ? 1 : std::atoi(text));
  const auto allowed = static_cast<int>(allowedCores().count());
  const int own = std::min({found, allowed / ranks, grantedCores() / ranks});
  int before = least.load();
  while (own < before && !least.compare_exchange_weak(before, own)) {
  }
  return std::min(own, before);
}

}  // namespace fastcoll
