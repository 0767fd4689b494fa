// The cores that threads may run on, and whether the ranks of a host have one each: only then may a
// rank spin while it waits for another, which may need the very core that would be spun on.
//
// Launchers bind ranks to cores of their own, so that a rank sees only its own. What counts are the
// cores of all ranks that may meet on one.
#pragma once

#include <bitset>
#include <vector>

namespace fastcoll {

/// Cores by their number; those from the last on share places, so that a machine with more of them
/// is thought to have fewer.
using CoreSet = std::bitset<1024>;

/// Those that the calling thread may run on; none where the kernel does not tell.
CoreSet allowedCores();
/// As many cores' time as the control group grants this process.
int grantedCores();

/// Whether `self`, one of `ranks`, has a core for itself: the ranks that may meet with it on a
/// core, and those that may meet with these, have at least as many cores as they are, and `granted`
/// is no less. Ranks whose cores are unknown meet with all.
bool hasCoreEach(const std::vector<CoreSet>& ranks, std::size_t self, int granted);

}  // namespace fastcoll
