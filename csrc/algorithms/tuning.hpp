// The sizes at which one way of doing a collective gives way to another. They change the time,
// never the result's bits. Equal on all ranks of a group: the rendezvous compares fingerprints.
//
// The values here were measured on the machine that fastcoll/default_tuning.json names; `python -m
// fastcoll.tune` measures those of another host.
#pragma once

#include <cstddef>
#include <cstdint>

#include "../base/hash.hpp"

namespace fastcoll {

struct TuningTable {
  /// All-reduce: one shot up to twice this many bytes divided by the ranks.
  std::size_t oneShotBytes = 24 << 10;
  /// Most bytes of a segment of messages up to `longBytes`, which two ranks exchange in place where
  /// they can (exchange.hpp), and of longer ones. A quarter of the
  /// ring is never exceeded.
  std::size_t segmentBytes = 512 << 10;
  std::size_t longSegmentBytes = 256 << 10;
  std::size_t longBytes = 8 << 20;
  /// From here on results are written past the caches.
  std::size_t streamingBytes = 16 << 20;
  /// From here on peers read a message where it is, if it lies in shared memory; in all-reduce they
  /// write the result there too, from the second size on.
  std::size_t directBytes = 32 << 10;
  std::size_t directAllReduceBytes = 32 << 10;
  /// Latency times bandwidth of the link between hosts: what it carries in the time of an empty
  /// step, and so the bytes that one step less is worth (hosts/selector.hpp). An estimate: 1 Gbit/s
  /// in 164 us, with which all_reduce and broadcast over three and four hosts take more steps from
  /// 13 to 40 KiB on. `python -m fastcoll.tune --hosts` measures it.
  std::size_t linkBytes = 20 << 10;

  std::uint64_t fingerprint() const {
    const std::size_t values[] = {oneShotBytes,   segmentBytes, longSegmentBytes,     longBytes,
                                  streamingBytes, directBytes,  directAllReduceBytes, linkBytes};
    return fnv(values, sizeof values);
  }
};

}  // namespace fastcoll
