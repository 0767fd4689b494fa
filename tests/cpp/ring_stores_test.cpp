// RingStores without a clock: the test passes costs of segments and checks the choices.
#include <cstdio>
#include <cstdlib>
#include <functional>

#include "shm/ring_stores.hpp"

using fastcoll::RingStores;
using fastcoll::StoresChoice;
using fastcoll::StoresChooser;

namespace {

constexpr std::size_t kRing = std::size_t{2} << 20;
constexpr std::size_t kSegment = 128 * 1024;

void expect(bool fine, const char* what) {
  if (fine) return;
  std::fprintf(stderr, "ring_stores_test: %s\n", what);
  std::exit(1);
}

/// Cost of a cache line in nanoseconds.
struct Cost {
  double plain;
  double streaming;
};
constexpr Cost kShared{2.7, 4.0};   // the cores share a cache
constexpr Cost kApart{16.0, 4.0};   // the cores share no cache
constexpr Cost kMemory{8.3, 10.8};  // the source comes from memory
constexpr Cost kApartMemory{18.0, 9.0};
constexpr Cost kBetween{5.2, 4.0};
constexpr Cost kSharedShort{8.0, 2.6};  // the highest of short segments in a shared cache
constexpr std::size_t kShort = 16 * 1024;

bool streaming(RingStores& stores, std::size_t bytes) {
  const StoresChooser* const chooser = stores.chooserFor(bytes);
  if (chooser != nullptr) return chooser->streaming();
  return stores.fill(bytes, [](bool) { return std::size_t{0}; });
}

bool timed(RingStores& stores, std::size_t bytes) {
  const StoresChooser* const chooser = stores.chooserFor(bytes);
  return chooser != nullptr && chooser->timed();
}

void wrote(RingStores& stores, std::size_t bytes, std::size_t written, double time, bool way) {
  if (auto* const chooser = stores.chooserFor(bytes)) chooser->wrote(written, time, way);
}

/// Writes `segments` segments; returns how many of them used streaming stores. `disturbed(i)`: the
/// thread is preempted in segment i.
int write(
    RingStores& stores, int segments, Cost cost, std::size_t bytes = kSegment,
    const std::function<bool(int)>& disturbed = [](int) { return false; }) {
  int streamed = 0;
  for (int i = 0; i < segments; ++i) {
    const bool way = streaming(stores, bytes);
    streamed += way ? 1 : 0;
    double time = (way ? cost.streaming : cost.plain) * static_cast<double>(bytes) / 64;
    if (disturbed(i)) time += 4e6;
    wrote(stores, bytes, bytes, timed(stores, bytes) ? time : 0, way);
  }
  return streamed;
}

constexpr int kPass = kRing / kSegment;
constexpr int kCycle = StoresChooser::kCycle * kPass;
constexpr int kTry = kPass + StoresChooser::kTries;  // most segments of a try
constexpr int kMany = 5 * kCycle + kCycle / 2;       // with five or six tries

RingStores begun(Cost cost) {
  RingStores stores(StoresChoice::Auto, kRing);
  expect(write(stores, StoresChooser::kFirst * kPass, cost) == 0, "the first passes are plain");
  write(stores, 2 * kTry, cost);
  return stores;
}

void sharedCacheStaysPlain() {
  RingStores stores = begun(kShared);
  expect(write(stores, kMany, kShared) <= 6 * kTry, "with a shared cache only tries stream");
  write(stores, kCycle, kMemory);
  expect(write(stores, kMany, kMemory) <= 6 * kTry, "messages from memory stay plain");
  expect(write(stores, kMany, kShared) <= 6 * kTry, "and those in the cache after them");
}

void apartTurns() {
  RingStores stores = begun(kShared);
  write(stores, kCycle, kShared);
  write(stores, 2 * kTry, kApart);
  expect(write(stores, kTry, kApart) == kTry,
         "it streams after as many segments as two tries have");
  write(stores, kCycle, kApart);
  expect(write(stores, kMany, kApart) >= kMany - 6 * kTry, "plain stores are only tried");
  expect(write(stores, kMany, kApartMemory) >= kMany - 7 * kTry, "messages from memory stream too");
  expect(write(stores, kMany, kApart) >= kMany - 7 * kTry, "and those in the cache after them");

  write(stores, kMany, kMemory);
  write(stores, kMany, kShared);
  write(stores, kMany, kMemory);
  write(stores, kCycle + 2 * kTry, kApart);
  expect(write(stores, kTry, kApart) == kTry, "within a cycle, where streaming was dear");

  RingStores early = begun(kApart);
  expect(write(early, kTry, kApart) == kTry, "a group that begins apart streams");
}

void turnsBack() {
  RingStores stores = begun(kApart);
  write(stores, kCycle, kApart);
  write(stores, kCycle + 2 * kTry, kShared);
  expect(write(stores, kTry, kShared) == 0, "back within a cycle");
  write(stores, 2 * kTry, kApart);
  expect(write(stores, kTry, kApart) == kTry, "and again");
}

void betweenTheThresholdsNothingTurns() {
  RingStores plain = begun(kShared);
  expect(write(plain, kMany, kBetween) <= 6 * kTry, "plain stays plain");
  RingStores streaming = begun(kApart);
  expect(write(streaming, kMany, kBetween) >= kMany - 6 * kTry, "streaming stays streaming");
}

/// In the first pass after a change, costs depend on what the former stores left in the caches.
void theFirstPassDoesNotCount() {
  for (const double factor : {0.1, 10.0}) {
    for (const Cost cost : {kShared, kApart}) {
      RingStores stores = begun(cost);
      const bool chosen = streaming(stores, kSegment);
      bool last = chosen;
      int sinceChange = kPass;
      int others = 0;
      for (int i = 0; i < kMany; ++i) {
        const bool way = streaming(stores, kSegment);
        sinceChange = way == last ? sinceChange + 1 : 0;
        last = way;
        others += way == chosen ? 0 : 1;
        const double line = way ? cost.streaming : cost.plain;
        const double time = line * kSegment / 64 * (sinceChange < kPass ? factor : 1);
        wrote(stores, kSegment, kSegment, timed(stores, kSegment) ? time : 0, way);
      }
      expect(others <= 6 * kTry, "a first pass turns nothing");
    }
  }
}

void preemptionTurnsNothing() {
  // One segment in five, for both kinds of stores: the median is one of the others.
  const auto often = [](int i) { return i % 5 == 1; };
  RingStores shared = begun(kShared);
  expect(write(shared, kMany, kShared, kSegment, often) <= 6 * kTry, "plain although preempted");
  RingStores apart = begun(kApart);
  expect(write(apart, kMany, kApart, kSegment, often) >= kMany - 6 * kTry,
         "streaming although preempted");
}

/// A short segment's costs differ, although plain stores are better.
void whatIsCheapToWriteOnlyStaysPlain() {
  constexpr int kShorter = kSegment / kShort;
  RingStores stores = begun(kShared);
  const auto few = [&](const char* what) {
    const int tries = 6 * (kShorter * kPass + StoresChooser::kTries);
    expect(write(stores, kShorter * kMany, kSharedShort, kShort) <= tries, what);
  };
  write(stores, kShorter * kCycle, kSharedShort, kShort);
  few("plain although streaming is cheaper to write");
  write(stores, kShorter * kCycle, kApart, kShort);
  write(stores, kShorter * 2 * kCycle, kShared, kShort);
  few("and again after streaming");
}

void readsTheClockSeldom() {
  RingStores stores = begun(kShared);
  int count = 0;
  for (int i = 0; i < kCycle / 2; ++i) {
    count += timed(stores, kSegment) ? 1 : 0;
    write(stores, 1, kShared);
  }
  expect(count > 0 && count <= kCycle / 2 / StoresChooser::kTimed, "for one segment in kTimed");
}

void smallSegmentsDoNotCount() {
  constexpr std::size_t kSmall = StoresChooser::kLeastBytes - 64;
  RingStores stores = begun(kShared);
  expect(write(stores, 5000, kApart, kSmall) == 0, "small segments are plain");
  const bool next = streaming(stores, kSegment);
  RingStores same = begun(kShared);
  expect(streaming(same, kSegment) == next, "and teach nothing");
  RingStores apart = begun(kApart);
  expect(streaming(apart, kSegment) && !streaming(apart, kSmall), "whatever large ones are");
  // Segments were reserved, but there was little to write.
  const auto writeLittle = [](RingStores& some, std::size_t written) {
    int streamed = 0;
    for (int i = 0; i < kMany; ++i) {
      const bool way = streaming(some, kSegment);
      streamed += way ? 1 : 0;
      wrote(some, kSegment, written, timed(some, kSegment) ? 1e6 : 0, way);
    }
    return streamed;
  };
  for (const std::size_t written : {std::size_t{0}, kSmall}) {
    expect(writeLittle(apart, written) == kMany, "nor do segments with little in them");
    RingStores fresh(StoresChoice::Auto, kRing);
    expect(writeLittle(fresh, written) == 0, "and they try nothing");
  }
  expect(write(apart, 100, kApart) == 100, "streaming goes on after them");
}

void eachLengthHasAChoice() {
  RingStores stores = begun(kShared);
  write(stores, kSegment / kShort * kCycle, kApart, kShort);
  for (int i = 0; i < 100; ++i) {
    write(stores, 1, kApart, kShort);
    write(stores, 1, kShared);
  }
  expect(write(stores, 100, kApart, kShort) == 100, "short ones stream");
  expect(write(stores, 100, kShared) == 0, "long ones beside them are plain");
}

void forced() {
  RingStores plain(StoresChoice::Plain, kRing), streaming(StoresChoice::Streaming, kRing);
  expect(write(plain, 1000, kApart) == 0, "plain is plain");
  expect(write(streaming, 1000, kShared) == 1000, "streaming is streaming");
  expect(write(streaming, 10, kShared, 4096) == 10, "of any size");
}

}  // namespace

int main() {
  sharedCacheStaysPlain();
  apartTurns();
  turnsBack();
  betweenTheThresholdsNothingTurns();
  theFirstPassDoesNotCount();
  preemptionTurnsNothing();
  whatIsCheapToWriteOnlyStaysPlain();
  readsTheClockSeldom();
  smallSegmentsDoNotCount();
  eachLengthHasAChoice();
  forced();
}
