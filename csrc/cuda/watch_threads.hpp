// The two threads of a process that watch all its groups of device tensors, while it has any.
//
//   fastcoll-dog   polls calls under way (Watchdog::turn). A driver may block it for ever.
//   fastcoll-news  checks the first one once a second (Watchdog::check), and reads the store for
//                  faults of other ranks. A store may block it.
//
// Neither takes the GIL, unless a store is written in Python.
#pragma once

#include <memory>

#include "base/clock.hpp"

namespace fastcoll {

class Watchdog;

/// Watches a group from now on. Starts the threads unless they run; throws std::system_error.
void startWatching(const std::shared_ptr<Watchdog>& group);
/// Ends the present wait of the first thread.
void wakeWatching();
/// Watches the group no longer. Waits, at most `grace`, until no thread uses it.
void stopWatching(const std::shared_ptr<Watchdog>& group, Milliseconds grace) noexcept;

}  // namespace fastcoll
