// Which stores fill the segments of a ring: plain ones, or streaming ones (non-temporal, past the
// caches; copyStreaming).
//
// A plain store to a line that a peer has read takes the line back from the peer's cache. Between
// cores that share a cache this costs little, and the peer finds the new bytes in that cache.
// Between other cores it costs several times as much as a streaming store. The case differs from
// pair to pair, and changes when the system moves a thread or a virtual machine's cores. So a
// ring's writer chooses by the measured costs of its segments. Each rank chooses alone, because the
// choice changes no bit.
#pragma once

#include <array>
#include <chrono>
#include <cstddef>
#include <limits>

#include "base/clock.hpp"
#include "base/settings.hpp"

namespace fastcoll {

/// Chooses for segments of similar length.
class StoresChooser {
 public:
  /// Streaming begins when plain stores cost `begins` times as much, and ends when they cost less
  /// than kStays of that. The writer's cost is not all, because peers read streamed lines from
  /// memory. AMD EPYC, 2 ranks, nanoseconds per line for plain and streaming stores, and the time
  /// of the call with streaming over that with plain stores (never measure with zeros, whose
  /// streaming stores cost half):
  ///                                  cores share a cache      other cores
  ///   broadcast, 128 KiB to 1 MiB    2.2–3.2 and 4   2.6      16 and 4      0.4
  ///   broadcast from 8 MiB           8 and 11        1.3      17–21 and 9   0.5
  ///   all_to_all from 256 KiB        4–10 and 6–12   1.4      7–12 and 4–8  0.9
  ///   all_to_all of 32 KiB           8 and 2.6       1.2      9.3 and 2.6   0.9
  explicit StoresChooser(double begins) : begins_(begins) {}
  static constexpr double kStays = 0.8;
  /// In each cycle, the first kTries segments use the other stores. A cycle begins anew at once
  /// when plain stores cost kRises times as much as at the last try.
  static constexpr int kCycle = 1024;
  static constexpr int kTries = 3;
  static constexpr double kRises = 2.0;
  /// Outside tries, one segment in kTimed is timed, because reading the clock separates copies.
  static constexpr int kTimed = 4;

  /// Whether the next segment is to be written with streaming stores.
  bool streaming() const { return now_ != (at_ < kTries); }
  /// Counts the segment, or returns true: then time it and pass its cost to took().
  bool timed();
  /// Records the cost of a segment, in nanoseconds a byte.
  void took(double cost, bool streaming);

 private:
  /// The last costs of one kind of stores, in nanoseconds a byte. One or two segments during which
  /// the thread did not run do not move their median.
  struct Costs {
    static constexpr int kKept = 5;
    std::array<double, kKept> last{};
    int seen = 0;

    void add(double cost) { last[seen++ % kKept] = cost; }
    double median() const;
  };

  double begins_;
  bool now_ = false;                   // streaming stores are the present ones
  int at_ = kCycle - kTries * kTimed;  // in the cycle; plain costs come first
  double plainThen_ = std::numeric_limits<double>::infinity();  // plain cost at the last try
  Costs plain_;
  Costs streaming_;
};

class RingStores {
 public:
  /// With StoresChoice::Auto, shorter segments use plain stores and are not measured.
  static constexpr std::size_t kLeastBytes = 8 * 1024;
  /// Shorter segments have their own chooser.
  static constexpr std::size_t kLongBytes = 64 * 1024;
  /// A line of a short segment costs more with plain stores, also between cores that share a cache.
  static constexpr double kShortBegins = 3.25;
  static constexpr double kLongBegins = 1.75;
  /// Of a ring with one reader. Plain stores of a message of 2 MiB and more cost 0.4 to 1.0 times
  /// as much between cores that share a cache, and 1.4 to 2.0 times as much between other cores.
  /// There a call with streaming stores takes 0.7 to 0.8 of the time.
  static constexpr double kPairBegins = 1.5;

  /// `ringBytes`: the first pass through the ring is not measured, because no peer has read those
  /// lines yet. `longBegins`: see StoresChooser; for long segments.
  explicit RingStores(StoresChoice choice = StoresChoice::Plain, std::size_t ringBytes = 0,
                      double longBegins = kLongBegins)
      : choice_(choice), fresh_(ringBytes), long_(longBegins) {}

  /// Whether the next segment, of `bytes`, is to be written with streaming stores.
  bool streaming(std::size_t bytes) const;
  /// Whether to time this segment and pass its time to took().
  bool timed(std::size_t bytes);
  /// Records the time in which these stores wrote `written` bytes of a segment of `bytes`.
  void took(std::size_t bytes, std::size_t written, double nanoseconds, bool streaming);

  /// Calls write(streaming) for a segment of `bytes` and records its time. `write` must not wait;
  /// it returns the number of bytes written. Returns whether the stores were streaming.
  template <typename Write>
  bool fill(std::size_t bytes, Write write) {
    const bool way = streaming(bytes);
    if (!timed(bytes)) {
      write(way);
      return way;
    }
    const TimePoint start = Clock::now();
    const std::size_t written = write(way);
    const std::chrono::duration<double, std::nano> time = Clock::now() - start;
    took(bytes, written, time.count(), way);
    return way;
  }

 private:
  bool learns(std::size_t bytes) const {
    return choice_ == StoresChoice::Auto && bytes >= kLeastBytes;
  }
  StoresChooser& chooser(std::size_t bytes) { return bytes < kLongBytes ? short_ : long_; }
  const StoresChooser& chooser(std::size_t bytes) const {
    return bytes < kLongBytes ? short_ : long_;
  }

  StoresChoice choice_;
  std::size_t fresh_;  // bytes left of the first pass
  StoresChooser short_{kShortBegins};
  StoresChooser long_;
};

}  // namespace fastcoll
