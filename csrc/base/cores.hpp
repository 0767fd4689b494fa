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

/// Whether `self`, one of the `ranks` of a host, has a core for itself: each of the ranks that may
/// meet with it on a core, and of those that may meet with these, can be given one of its own, and
/// `granted` is enough for all ranks, which share it wherever they are bound. False where the cores
/// of a rank that may meet with it are unknown; such a rank may meet with all.
bool hasCoreEach(const std::vector<CoreSet>& ranks, std::size_t self, int granted);

}  // namespace fastcoll
