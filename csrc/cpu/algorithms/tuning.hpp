// The sizes at which a collective changes its algorithm. They change the time, never the result's
// bits. They are equal on all ranks of a group: the rendezvous compares fingerprints.
//
// The values here were measured on the machine that fastcoll/default_tuning.json names. Run `python
// -m fastcoll.tune` to measure those of another host.
#pragma once

#include <cstddef>
#include <cstdint>

#include "base/hash.hpp"

namespace fastcoll {

struct TuningTable {
  /// All-reduce: one shot up to 2 * oneShotBytes / ranks.
  std::size_t oneShotBytes = 24 << 10;
  /// Most bytes of a segment: of messages up to `longBytes`, and of longer ones. A segment never
  /// exceeds a quarter of the ring. Two ranks exchange messages up to `longBytes` in place where
  /// they can (exchange.hpp).
  std::size_t segmentBytes = 512 << 10;
  std::size_t longSegmentBytes = 256 << 10;
  std::size_t longBytes = 8 << 20;
  /// From this size on, results are written past the caches.
  std::size_t streamingBytes = 16 << 20;
  /// From `directBytes` on, peers read a message in place if it lies in shared memory. All-reduce
  /// does so from `directAllReduceBytes` on; its peers write the result there too.
  std::size_t directBytes = 32 << 10;
  std::size_t directAllReduceBytes = 32 << 10;
  /// Latency times bandwidth of the link between hosts: the bytes that it carries in the time of an
  /// empty step. So a saved step is worth as many bytes (cpu/hosts/selector.hpp). The default is an
  /// estimate: 1 Gbit/s in 164 us. With it, all_reduce and broadcast over three and four hosts take
  /// more steps from 13 to 40 KiB on. Run `python -m fastcoll.tune --hosts` to measure it.
  std::size_t linkBytes = 20 << 10;

  std::uint64_t fingerprint() const {
    const std::size_t values[] = {oneShotBytes,   segmentBytes, longSegmentBytes,     longBytes,
                                  streamingBytes, directBytes,  directAllReduceBytes, linkBytes};
    return fnv(values, sizeof values);
  }
};

}  // namespace fastcoll
