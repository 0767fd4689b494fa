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

namespace {

/// Gives the rank a core of its set by augmenting paths (Kuhn's algorithm): a core that is free, or
/// whose holder finds another one. `holder`: the rank of each core, or -1. False if there is none.
bool seat(const std::vector<CoreSet>& ranks, int rank, CoreSet& tried, std::vector<int>& holder) {
  for (std::size_t core = 0; core < tried.size(); ++core) {
    if (!ranks[rank][core] || tried[core]) continue;
    tried.set(core);
    if (holder[core] >= 0 && !seat(ranks, holder[core], tried, holder)) continue;
    holder[core] = rank;
    return true;
  }
  return false;
}

}  // namespace

bool hasCoreEach(const std::vector<CoreSet>& ranks, std::size_t self, int granted) {
  if (static_cast<std::size_t>(granted) < ranks.size()) return false;
  const auto known = [&](std::size_t rank) {
    return ranks[rank].none() ? ~CoreSet{} : ranks[rank];
  };
  CoreSet reach = known(self);
  std::vector<bool> meets(ranks.size(), false);
  std::vector<int> holder(reach.size(), -1);
  for (bool grew = true; grew;) {
    grew = false;
    for (std::size_t rank = 0; rank < ranks.size(); ++rank) {
      if (meets[rank] || (known(rank) & reach).none()) continue;
      meets[rank] = grew = true;
      reach |= known(rank);
      CoreSet tried;
      // An unknown set has no core to give.
      if (!seat(ranks, static_cast<int>(rank), tried, holder)) return false;
    }
  }
  return true;
}

}  // namespace fastcoll
