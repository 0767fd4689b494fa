// Which stores fill the segments of a ring: plain ones, or streaming ones (non-temporal, past the
// caches; copyStreaming).
//
// A plain store to a line that a peer has read takes the line back from the peer's cache. Between
// cores that share a cache this costs little, and the peer finds the new bytes in that cache.
// Between other cores it costs several times as much as a streaming store. The case differs from
// pair to pair, and changes when the system moves a thread or a virtual machine's cores. So a
// ring's writer chooses by the measured costs of its segments. The kernel's report of caches does
// not decide it: on one virtual machine whose cores share a cache by that report, broadcasts of
// 1 MiB took 34 to 471 us with plain stores, and 35 to 49 us with this choice, in turns.
//
// Each rank chooses alone, because the choice changes no bit. Segments into which peers write get
// plain stores without a measurement: their lines come back to their owner's cache, so streaming
// gains little at best.
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
  /// memory. AMD EPYC, broadcast over 2 ranks: cost of plain over streaming stores, and time of the
  /// call with streaming over that with plain stores. Never measure with zeros, whose streaming
  /// stores cost half. The highest ratios between cores that share a cache are those of single
  /// tries, while other machines fill that cache.
  ///                     cores share a cache     other cores
  ///   32 KiB            0.8–3.1   2.1           4.2–5.4   0.5
  ///   256 KiB, 1 MiB    0.4–2.0   2 to 3        3.0–5.1   0.5
  ///   4 MiB             0.4–1.3   4             1.7–4.8   0.5
  StoresChooser(double begins, std::size_t ringBytes)
      : begins_(begins), ringBytes_(ringBytes), at_((kCycle - kFirst) * ringBytes) {}
  static constexpr double kStays = 0.8;
  /// Shorter segments use plain stores and are not measured.
  static constexpr std::size_t kLeastBytes = 8 * 1024;
  /// A try of the other stores begins after kCycle passes through the ring, or at once when plain
  /// stores cost kRises times as much as at the last try. It ends when kTries segments are timed.
  /// The first pass of a try, and the one after it, are not timed, because the former stores decide
  /// which lines the caches hold. The first try begins after kFirst passes.
  static constexpr std::size_t kCycle = 128;
  static constexpr std::size_t kFirst = 8;
  static constexpr int kTries = 3;
  static constexpr double kRises = 2.0;
  /// Outside tries, one segment in kTimed is timed, because reading the clock separates copies.
  static constexpr int kTimed = 4;

  /// Whether the next segment is to be written with streaming stores.
  bool streaming() const { return now_ != (tries_ > 0); }
  /// Whether to time the next segment.
  bool timed() const { return at_ >= ringBytes_ && (tries_ > 0 || untimed_ + 1 >= kTimed); }
  /// Counts a segment, unless little was written; `nanoseconds`: the time of the stores, if timed()
  /// said so.
  void wrote(std::size_t bytes, double nanoseconds, bool streaming);

 private:
  /// The last costs of one kind of stores, in nanoseconds a byte. One or two segments during which
  /// the thread did not run do not move their median.
  struct Costs {
    static constexpr std::size_t kKept = 5;
    std::array<double, kKept> last{};
    std::size_t seen = 0;

    void add(double cost) { last[seen++ % kKept] = cost; }
    double median() const;
  };

  void beginTry();
  void decide();

  double begins_;
  std::size_t ringBytes_;
  bool now_ = false;  // streaming stores are the present ones
  std::size_t at_;    // bytes written since the last try began or ended
  int tries_ = 0;     // segments left to time in a try
  int untimed_ = 0;   // segments since a timed one
  double plainThen_ = std::numeric_limits<double>::infinity();  // plain cost at the last try
  Costs plain_;
  Costs streaming_;
};

class RingStores {
 public:
  /// Shorter segments have their own chooser.
  static constexpr std::size_t kLongBytes = 64 * 1024;
  static constexpr double kShortBegins = 3.25;
  static constexpr double kLongBegins = 1.6;

  explicit RingStores(StoresChoice choice = StoresChoice::Plain, std::size_t ringBytes = 0)
      : choice_(choice), choosers_{{kShortBegins, ringBytes}, {kLongBegins, ringBytes}} {}

  /// Chooses for segments of `bytes`; nullptr: nothing is measured for these.
  StoresChooser* chooserFor(std::size_t bytes) {
    if (choice_ != StoresChoice::Auto || bytes < StoresChooser::kLeastBytes) return nullptr;
    return &choosers_[bytes < kLongBytes ? 0 : 1];
  }

  /// Calls write(streaming) for a segment of `bytes` and records its time. `write` must not wait;
  /// it returns the number of bytes written. Returns whether the stores were streaming.
  template <typename Write>
  bool fill(std::size_t bytes, Write write) {
    StoresChooser* const chooser = chooserFor(bytes);
    if (chooser == nullptr) {
      const bool way = choice_ == StoresChoice::Streaming;
      write(way);
      return way;
    }
    const bool way = chooser->streaming();
    std::chrono::duration<double, std::nano> time{0};
    const TimePoint start = chooser->timed() ? Clock::now() : TimePoint::max();
    const std::size_t written = write(way);
    if (start != TimePoint::max()) time = Clock::now() - start;
    chooser->wrote(written, time.count(), way);
    return way;
  }

 private:
  StoresChoice choice_;
  StoresChooser choosers_[2];  // for short segments, and for long ones
};

}  // namespace fastcoll
