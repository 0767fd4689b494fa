// Which stores fill the segments of a ring: plain ones, or streaming ones (non-temporal, past the
// caches; copyStreaming).
//
// A plain store to a line that a peer has read takes the line back from the peer's cache. Between
// cores that share a cache that is cheap, and the peer finds the new bytes in it; between others it
// costs several times a streaming store. Which of the two holds differs from pair to pair, and
// changes when the system moves a thread or a virtual machine's cores. So the writer of a ring
// chooses by what its segments have cost. The choice is each rank's own: it changes no bit.
#pragma once

#include <array>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <limits>

#include "../base/clock.hpp"
#include "../base/settings.hpp"

namespace fastcoll {

/// Chooses for segments of about one length: a line of a short one costs more, in either way.
class StoresChooser {
 public:
  /// Streaming begins when plain stores cost so many times as much, and ends below the second. The
  /// writer's cost is not all: what streams is read from memory. AMD EPYC, nanoseconds a line of a
  /// plain store and of a streaming one: cores that share a cache 1.5 and 2.3, in segments of 8 KiB
  /// 5 and 1.5; others 16 to 26 and 2, where a line comes back from its reader 7 and 2. Of these
  /// streaming is worth it in the third only, where a broadcast takes a fifth to a third.
  static constexpr double kBegins = 6.0;
  static constexpr double kEnds = 4.0;
  /// Streaming is tried at once when plain stores cost so many times what they cost at its last
  /// try.
  static constexpr double kRises = 3.0;
  /// After so many timed segments in one way the other is tried again: soon after a turn, and the
  /// less often the longer it lasts.
  static constexpr int kFirstRest = 16;
  static constexpr int kLongestRest = 512;
  /// One segment in so many is timed while nothing is tried: the clock keeps copies apart.
  static constexpr int kTimed = 4;

  /// Whether the next segment is to be written with streaming stores.
  bool streaming() const { return now_ != (tries_ > 0); }
  /// Whether the time of this segment is to be told.
  bool timed();
  /// A segment has cost so many nanoseconds a byte.
  void took(double cost, bool streaming);

 private:
  /// The last costs of one way, in nanoseconds a byte. Their median is not moved by one or two
  /// segments during which the thread did not run.
  struct Costs {
    static constexpr int kKept = 5;
    static constexpr int kEnough = 3;
    std::array<double, kKept> last{};
    int seen = 0;

    void add(double cost) { last[seen++ % kKept] = cost; }
    bool enough() const { return seen >= kEnough; }
    double median() const;
  };

  Costs& costs(bool streaming) { return streaming ? streaming_ : plain_; }
  bool wantsOther() const;
  void turn();
  void weigh(double latest);

  int untimed_ = 0;
  bool now_ = false;            // streaming is the present way
  int tries_ = Costs::kEnough;  // segments that the other way is to be tried for
  int inARow_ = 0;              // timed segments since the other way was tried
  int rest_ = kFirstRest;       // timed segments from a try of the other way to the next
  double plainThen_ = std::numeric_limits<double>::infinity();  // when streaming was tried
  Costs plain_;
  Costs streaming_;
};

class RingStores {
 public:
  /// Segments of fewer bytes are written plainly, and tell nothing.
  static constexpr std::size_t kLeastBytes = 8 * 1024;
  /// Segments of fewer bytes have a choice of their own.
  static constexpr std::size_t kLongBytes = 64 * 1024;

  /// `ringBytes`: the first pass through the ring tells nothing, for no peer has read those lines.
  explicit RingStores(StoresChoice choice = StoresChoice::Plain, std::size_t ringBytes = 0)
      : choice_(choice), fresh_(ringBytes) {}

  /// Whether the next segment, of `bytes`, is to be written with streaming stores.
  bool streaming(std::size_t bytes) const;
  /// Whether the time of this segment is to be told.
  bool timed(std::size_t bytes);
  /// Of a segment of `bytes`, `written` have been written in that way within so many nanoseconds.
  void took(std::size_t bytes, std::size_t written, double nanoseconds, bool streaming);

  /// Calls write(streaming) for a segment of `bytes`, and learns from the time it takes; it waits
  /// for nobody, and returns how many bytes it has written. Returns whether it was streaming.
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
  std::size_t fresh_;  // bytes of the first pass that are left
  StoresChooser short_;
  StoresChooser long_;
};

}  // namespace fastcoll
