// The cores that threads may run on, and whether each rank of a host has its own core. Only then
// may a rank spin while it waits, because the awaited rank may need the core that spins.
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

/// Whether `self`, one of the `ranks` of a host, has a core for itself. Two conditions:
/// - Every rank that may share a core with it, directly or through other ranks, can get its own.
/// - `granted` is enough for all ranks, which share that time wherever they are bound.
/// A rank whose cores are unknown (an empty set) may share a core with any rank. If such a rank
/// may share a core with `self`, the result is false.
bool hasCoreEach(const std::vector<CoreSet>& ranks, std::size_t self, int granted);

}  // namespace fastcoll
