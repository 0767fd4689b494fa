// Detects that this process is a fork of the one that made fastcoll's state. A child shares the
// parent's mapped control blocks but has none of its threads. It must neither use nor free them.
#pragma once

#include <cstdint>

#include "base/exported.hpp"

namespace fastcoll {

/// A number that is equal for the life of one process and differs in every child it forks.
FASTCOLL_EXPORTED std::uint64_t forkGeneration();

}  // namespace fastcoll
