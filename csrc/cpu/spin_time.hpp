// How long a wait for other ranks spins before it sleeps; see docs/concepts/faults.md.
#pragma once

#include <atomic>
#include <cstdint>
#include <exception>

#include "base/clock.hpp"
#include "group/rendezvous.hpp"

namespace fastcoll {

/// 0 until it is decided. From any thread.
class SpinTime {
 public:
  /// `chosen`: by the user, in microseconds, or -1.
  explicit SpinTime(std::int64_t chosen) : chosen_(static_cast<int>(chosen)) {}

  int micros() const { return micros_; }
  /// `coresEach`: with one, every rank has a core of its own, so spinning delays no other rank.
  void decide(int coresEach) {
    decided_ = true;
    micros_ = chosen_ >= 0 ? chosen_ : coresEach >= 1 ? kMicros : 0;
  }
  /// For a rank that has met a peer: decides once all ranks have created the group.
  void poll(Rendezvous& rendezvous) {
    const auto now = Clock::now();
    if (decided_ || now < nextPoll_.load()) return;
    nextPoll_ = now + kPoll;
    try {
      if (const auto coresEach = rendezvous.coresEachIfKnown()) decide(*coresEach);
    } catch (const std::exception&) {
      // The store is gone, or a rank that these messages do not need has a wrong record. The next
      // collective raises that error.
    }
  }

 private:
  static constexpr int kMicros = 50;  // if every local rank has a core of its own
  static constexpr Milliseconds kPoll{200};

  const int chosen_;
  std::atomic<int> micros_{0};
  std::atomic<bool> decided_{false};
  std::atomic<TimePoint> nextPoll_{TimePoint{}};
};

}  // namespace fastcoll
