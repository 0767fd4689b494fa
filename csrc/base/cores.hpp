// The cores that threads may run on, and how many a rank has for itself. Without one it may not
// spin while it waits, because the awaited rank may need the core that spins.
//
// Launchers bind each rank to its own cores, and a rank can read only those. So the check needs the
// cores of all ranks that may share a core.
#pragma once

#include <bitset>
#include <string>
#include <vector>

namespace fastcoll {

/// Cores by number, modulo 1024. A larger machine therefore counts as one with fewer cores.
using CoreSet = std::bitset<1024>;

/// The cores that the calling thread may run on; empty if the kernel does not report them.
CoreSet allowedCores();
/// The cores of a memory node (NUMA); empty if the kernel does not report them.
CoreSet coresOfNode(int node);
/// The cores of a list such as "0-3,8".
CoreSet coresOfList(const std::string& list);
/// The memory node of the core that runs the calling thread.
int presentNode();

/// The cores that share the last-level cache of all of `cores`: none if those have several caches,
/// and all if the kernel does not report it. `system`: the kernel's folder of cores.
CoreSet coresOfCache(const CoreSet& cores, const std::string& system = "/sys/devices/system/cpu");
/// Whether all of the ranks' cores share one last-level cache, as far as the kernel reports it.
/// `caches`: coresOfCache() of each rank's.
bool shareCache(const std::vector<CoreSet>& ranks, const std::vector<CoreSet>& caches);

/// While it lives, the calling thread runs on `cores` only, as far as it may run there.
class BoundTo {
 public:
  explicit BoundTo(const CoreSet& cores) noexcept;
  ~BoundTo();
  BoundTo(const BoundTo&) = delete;
  BoundTo& operator=(const BoundTo&) = delete;

 private:
  CoreSet before_;  // empty: nothing was changed
};

/// CPU time that the control group (v2) grants this process, in whole cores; 2^20 if unlimited.
int grantedCores();

/// How many cores a rank with the cores `own` has for itself. `ranks`: the cores of all ranks of
/// the machine, with this one. It has an equal part of `own`, among the ranks that may run there,
/// and of `granted`, which all ranks share wherever they are bound. 0 if a rank's cores are unknown
/// (an empty set), because it may run on any core.
int coresEach(const CoreSet& own, const std::vector<CoreSet>& ranks, int granted);

/// How many cores this process has for itself: the fewest that were found for one of its groups, a
/// group with `found` now among them. Of a torchrun job, no more than an equal part for each of
/// this host's ranks.
int coresOfProcess(int found);

}  // namespace fastcoll
