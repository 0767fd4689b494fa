// The trace's record of one call.
#pragma once

#include <cstddef>
#include <cstdint>

#include "base/dtype.hpp"

namespace fastcoll::trace {

/// Number of a record, from 1 in each process; 0: not recorded. Later events refer to it.
using RecordId = std::uint64_t;

enum class State : std::uint8_t { Scheduled, Started, Completed, Failed };

/// The sequence that a record's sequence number belongs to.
enum class Lane : std::uint8_t {
  Collective,        // the group's collectives on the CPU
  Device,            // the group's collectives on a device
  Message,           // the messages from one rank to another with one tag
  MonitoredBarrier,  // the group's monitored barriers
};

/// Sizes and dtypes of a call's tensors, in a fixed number of words. Each tensor has a header
/// (dtype and number of dimensions), then its sizes. Tensors that do not fit are left out, but
/// counted.
class Shapes {
 public:
  static constexpr int kWords = 40;

  // Leaves the words uninitialized, because a call writes few of them.
  Shapes() {}  // NOLINT(modernize-use-equals-default)

  /// Adds a tensor; add all inputs before the first output. `parts` > 0: a list of so many equal
  /// tensors, as one more dimension in front.
  void add(bool output, DType dtype, const std::int64_t* sizes, std::size_t dims,
           std::int64_t parts = 0) {
    ++(output ? outputs : inputs);
    const std::size_t all = dims + (parts > 0 ? 1 : 0);
    if (used + 1 + all > kWords || keptInputs + keptOutputs + 1 < inputs + outputs) return;
    words[used++] = static_cast<std::uint64_t>(all) << 8 | static_cast<std::uint64_t>(dtype);
    if (parts > 0) words[used++] = static_cast<std::uint64_t>(parts);
    for (std::size_t i = 0; i < dims; ++i) words[used++] = static_cast<std::uint64_t>(sizes[i]);
    ++(output ? keptOutputs : keptInputs);
  }

  std::uint16_t inputs = 0;
  std::uint16_t outputs = 0;
  std::uint8_t keptInputs = 0;
  std::uint8_t keptOutputs = 0;
  std::uint16_t used = 0;
  std::uint64_t words[kWords];
};

/// Digests of a collective's inputs and outputs on this rank (reduce/digest.hpp); 0: not taken.
struct Digests {
  std::uint64_t input = 0;
  std::uint64_t output = 0;
};

/// A record as stored in the ring, and as other processes read it (memory.hpp). The caller fills in
/// the description of the call, the trace the rest. Each field that changes later is a word of its
/// own.
struct Record {
  RecordId id = 0;
  std::uint64_t state = static_cast<std::uint64_t>(State::Scheduled);
  std::int64_t created = 0;  // ticks
  std::int64_t started = 0;  // 0: not yet
  std::int64_t ended = 0;    // 0: not yet
  std::uint64_t seq = 0;
  std::int64_t peer = -1;  // of a message; -1: any
  std::uint32_t group = 0;
  std::uint32_t stack = 0;  // place of its text (Memory::add), 0: none
  std::int64_t nanos = 0;   // the moment `created` by CLOCK_MONOTONIC; 0: was not read
  std::int64_t timeoutMillis = 0;
  Digests digests;
  std::int32_t root = -1;
  std::int32_t tag = 0;
  Lane lane = Lane::Collective;
  ReduceOp op = ReduceOp::None;
  bool device = false;
  bool sends = false;      // of a message
  std::uint32_t call = 0;  // its place in base/collectives.def
  Shapes shapes;
};

}  // namespace fastcoll::trace
