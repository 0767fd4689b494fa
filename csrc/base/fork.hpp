// Detects that this process is a fork of the one that made fastcoll's state. A child shares the
// parent's mapped control blocks but none of its threads: it must neither use nor tear them down.
#pragma once

#include <cstdint>

namespace fastcoll {

/// A number that is equal for the life of one process and differs in every child it forks.
std::uint64_t forkGeneration();

}  // namespace fastcoll
