// The sockets of a Gloo device, which torch keeps to itself: found as those that its thread polls,
// and set to what connections between hosts need.
#pragma once

#include <functional>
#include <vector>

#include "../base/clock.hpp"

namespace fastcoll {

class LoopSockets {
 public:
  /// Runs `start`, which makes the device. Another thread that begins to poll a listening socket at
  /// that very moment may have its sockets taken for the device's.
  explicit LoopSockets(const std::function<void()>& start);

  /// Those that are connected now.
  std::vector<int> connected() const;
  /// Waits until the peers' kernels have acknowledged all that was sent on those of `sockets` that
  /// are still connected, or until `until`.
  void drain(const std::vector<int>& sockets, TimePoint until) const;
  /// Sets sockets: small messages leave at once (Nagle's algorithm would hold them back until the
  /// peer's kernel acknowledges what went before, 40 ms later), and a connection breaks when the
  /// peer's kernel has been silent for so long. 0: TCP's own bounds.
  static void tune(const std::vector<int>& sockets, Milliseconds silence);

 private:
  std::vector<int> polls_;
};

}  // namespace fastcoll
