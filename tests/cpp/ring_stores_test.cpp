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
constexpr Cost kSharedShort{8.0, 2.6};  // a segment of 16 KiB, in a shared cache
constexpr std::size_t kShort = 16 * 1024;

/// Writes `segments` segments; returns how many of them used streaming stores. `disturbed(i)`: the
/// thread is preempted in segment i.
int write(
    RingStores& stores, int segments, Cost cost, std::size_t bytes = kSegment,
    const std::function<bool(int)>& disturbed = [](int) { return false; }) {
  int streamed = 0;
  for (int i = 0; i < segments; ++i) {
    const bool way = stores.streaming(bytes);
    streamed += way ? 1 : 0;
    if (!stores.timed(bytes)) continue;
    double time = (way ? cost.streaming : cost.plain) * static_cast<double>(bytes) / 64;
    if (disturbed(i)) time += 4e6;
    stores.took(bytes, bytes, time, way);
  }
  return streamed;
}

RingStores begun(Cost cost) {
  RingStores stores(StoresChoice::Auto, kRing);
  expect(write(stores, static_cast<int>(kRing / kSegment), cost) == 0,
         "the first pass through the ring is plain");
  write(stores, 100, cost);
  return stores;
}

void sharedCacheStaysPlain() {
  RingStores stores = begun(kShared);
  write(stores, 1000, kShared);  // trials become rarer
  expect(write(stores, 10240, kShared) <= 40, "with a shared cache 3 segments in 1024 stream");
  write(stores, 1000, kMemory);
  expect(write(stores, 10240, kMemory) <= 40, "messages from memory stay plain");
  expect(write(stores, 10240, kShared) <= 40, "and those in the cache after them");
}

void apartTurns() {
  RingStores stores = begun(kShared);
  write(stores, 5000, kShared);
  const int streamed = write(stores, 30, kApart);
  expect(streamed >= 15, "15 segments are enough to turn");
  write(stores, 1000, kApart);
  expect(write(stores, 10240, kApart) >= 10240 - 40, "plain stores are tried 3 times in 1024");
  expect(write(stores, 10240, kApartMemory) >= 10240 - 60, "messages from memory stream too");
  expect(write(stores, 10240, kApart) >= 10240 - 60, "and those in the cache after them");

  write(stores, 5000, kMemory);
  write(stores, 5000, kShared);
  write(stores, 5000, kMemory);
  write(stores, StoresChooser::kCycle, kApart);
  expect(write(stores, 50, kApart) >= 45, "within a cycle, where streaming was dear");

  RingStores early = begun(kApart);
  expect(write(early, 100, kApart) >= 90, "a group that begins apart streams");
}

void turnsBack() {
  RingStores stores = begun(kApart);
  write(stores, 5000, kApart);
  const int streamed = write(stores, 10000, kShared);
  expect(streamed <= StoresChooser::kCycle + 50, "back within a cycle");
  write(stores, 100, kApart);
  expect(write(stores, 100, kApart) >= 90, "and again");
}

void preemptionTurnsNothing() {
  // One segment in five, for both kinds of stores: the median is one of the others.
  const auto often = [](int i) { return i % 5 == 1; };
  RingStores shared = begun(kShared);
  expect(write(shared, 10000, kShared, kSegment, often) <= 100, "plain although preempted");
  RingStores apart = begun(kApart);
  expect(write(apart, 10000, kApart, kSegment, often) >= 9900, "streaming although preempted");
}

/// A short segment's costs differ, although plain stores are better.
void whatIsCheapToWriteOnlyStaysPlain() {
  RingStores stores = begun(kShared);
  write(stores, 1000, kSharedShort, kShort);
  expect(write(stores, 10240, kSharedShort, kShort) <= 40,
         "plain although streaming is cheaper to write");
  write(stores, 5000, kApart, kShort);
  write(stores, 5000, kShared, kShort);
  expect(write(stores, 10240, kSharedShort, kShort) <= 40, "and again after streaming");
}

void smallSegmentsDoNotCount() {
  constexpr std::size_t kSmall = RingStores::kLeastBytes - 64;
  RingStores stores = begun(kShared);
  expect(write(stores, 5000, kApart, kSmall) == 0, "small segments are plain");
  const bool next = stores.streaming(kSegment);
  RingStores same = begun(kShared);
  expect(same.streaming(kSegment) == next, "and teach nothing");
  RingStores apart = begun(kApart);
  expect(apart.streaming(kSegment) && !apart.streaming(kSmall), "whatever large ones are");
  // A segment was reserved, but there was nothing to write.
  for (int i = 0; i < 1000; ++i) apart.took(kSegment, 0, 1e6, true);
  expect(write(apart, 100, kApart) >= 95, "nor does an empty one");
}

void eachLengthHasAChoice() {
  RingStores stores = begun(kShared);
  write(stores, 100, kApart, kShort);
  for (int i = 0; i < 100; ++i) {
    write(stores, 1, kApart, kShort);
    write(stores, 1, kShared);
  }
  expect(write(stores, 100, kApart, kShort) >= 95, "short ones stream");
  expect(write(stores, 100, kShared) <= 5, "long ones beside them are plain");
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
  preemptionTurnsNothing();
  whatIsCheapToWriteOnlyStaysPlain();
  smallSegmentsDoNotCount();
  eachLengthHasAChoice();
  forced();
}
