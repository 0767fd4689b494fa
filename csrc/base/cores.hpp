// The cores that threads may run on, and whether a rank has its own core. Only then may it spin
// while it waits, because the awaited rank may need the core that spins.
//
// Launchers bind each rank to its own cores, and a rank can read only those. So the check needs the
// cores of all ranks that may share a core.
#pragma once

#include <bitset>
#include <vector>

namespace fastcoll {

/// Cores by number, modulo 1024. A larger machine therefore counts as one with fewer cores.
using CoreSet = std::bitset<1024>;

/// The cores that the calling thread may run on; empty if the kernel does not report them.
CoreSet allowedCores();
/// CPU time that the control group (v2) grants this process, in whole cores; 2^20 if unlimited.
int grantedCores();

/// Whether a rank with the cores `own` has a core for itself. `ranks`: the cores of all ranks of
/// the machine, with this one. Two conditions:
/// - No more ranks may run on cores of `own` than there are.
/// - `granted` is enough for all ranks, which share that time wherever they are bound.
/// False if a rank's cores are unknown (an empty set), because it may run on any core.
bool hasCoreEach(const CoreSet& own, const std::vector<CoreSet>& ranks, int granted);

}  // namespace fastcoll
