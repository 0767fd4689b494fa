// The sockets of a Gloo device, which torch does not expose. They are found as those that its
// thread polls, and set to what connections between hosts need.
#pragma once

#include <functional>
#include <vector>

#include "base/clock.hpp"

namespace fastcoll {

class LoopSockets {
 public:
  /// Runs `start`, which makes the device. If another thread begins to poll a listening socket at
  /// that very moment, its sockets may be taken for the device's.
  explicit LoopSockets(const std::function<void()>& start);

  /// The sockets that are connected now.
  std::vector<int> connected() const;
  /// Waits until the peers' kernels have acknowledged all that was sent on `sockets`, or until
  /// `until`. Skips sockets that are no longer connected.
  void drain(const std::vector<int>& sockets, TimePoint until) const;
  /// Sets socket options. Small messages leave at once: Nagle's algorithm would delay them until
  /// the peer's kernel acknowledges earlier data, 40 ms later. A connection breaks when the peer's
  /// kernel has been silent for `silence`; 0: TCP's own bounds.
  static void tune(const std::vector<int>& sockets, Milliseconds silence);

 private:
  std::vector<int> polls_;
};

}  // namespace fastcoll
