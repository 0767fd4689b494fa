#include "base/cores.hpp"

#include <sched.h>

#include <algorithm>
#include <atomic>
#include <cstdlib>
#include <fstream>
#include <sstream>

#include "base/error.hpp"

namespace fastcoll {
namespace {

/// The first word of a file; "" if there is none.
std::string wordOf(const std::string& path) {
  std::string word;
  std::ifstream(path) >> word;
  return word;
}

bool allow(const CoreSet& cores) {
  cpu_set_t set;
  CPU_ZERO(&set);
  for (std::size_t core = 0; core < cores.size(); ++core) {
    if (cores[core]) CPU_SET(core, &set);
  }
  return ::sched_setaffinity(0, sizeof set, &set) == 0;
}

}  // namespace

CoreSet coresOfList(const std::string& list) {
  CoreSet cores;
  std::istringstream ranges(list);
  for (std::size_t first = 0; ranges >> first; ranges.ignore()) {
    std::size_t last = first;
    if (ranges.peek() == '-') ranges.ignore() >> last;
    for (std::size_t core = first; core <= last && core < cores.size(); ++core) cores.set(core);
  }
  return cores;
}

CoreSet coresOfNode(int node) {
  return coresOfList(wordOf(concat("/sys/devices/system/node/node", node, "/cpulist")));
}

CoreSet coresOfCache(const CoreSet& cores, const std::string& system) {
  std::string list, found;
  const std::string caches = concat(system, "/cpu", cores._Find_first(), "/cache/index");
  for (int index = 0; !(found = wordOf(concat(caches, index, "/shared_cpu_list"))).empty();
       ++index) {
    list = found;  // the kernel lists the nearest first
  }
  const CoreSet sharing = coresOfList(list);
  if (sharing.none()) return ~sharing;
  return (cores & ~sharing).none() ? sharing : CoreSet();
}

bool shareCache(const std::vector<CoreSet>& ranks, const std::vector<CoreSet>& caches) {
  CoreSet all, sharing;
  sharing.set();
  for (const CoreSet& cores : ranks) all |= cores;
  for (const CoreSet& cache : caches) sharing &= cache;
  return (all & ~sharing).none();
}

int presentNode() {
  unsigned core = 0, node = 0;
  return ::getcpu(&core, &node) == 0 ? static_cast<int>(node) : -1;
}

// A machine with more cores than a set has is left alone.
BoundTo::BoundTo(const CoreSet& cores) noexcept {
  cpu_set_t set;
  if (::sched_getaffinity(0, sizeof set, &set) != 0) return;
  const CoreSet allowed = allowedCores();
  const CoreSet both = allowed & cores;
  if (both.any() && both != allowed && allow(both)) before_ = allowed;
}

BoundTo::~BoundTo() {
  if (before_.any()) allow(before_);
}

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
