// The memory of a trace: a file without a name. Other processes of this user read it while this one
// runs or hangs (`fastcoll top`, `fastcoll trace --pid`), and a dump is a copy of it.
// fastcoll/trace/memory.py is the reader of both, and has the same layout:
//
//   Header      one page
//   slots       the ring (ring.hpp)
//   texts       stacks, each with its length before it; the JSON of groups and errors
//
// A reader gets one state of the JSON in full. Each state is written to another place than the one
// before it, and then the header gets the new place.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <string_view>

namespace fastcoll::trace {

/// Changes with any change of what a reader reads: Header, Record, or the JSON.
constexpr std::uint32_t kLayout = 3;

/// What this rank has waited in collectives for the leader of another host, because that leader, a
/// rank of its host or the network was late. All ranks of this host wait meanwhile.
struct HostWaits {
  std::atomic<std::uint64_t> leader{0};  // its rank in the whole job, plus one; 0: not used
  std::atomic<std::int64_t> ticks{0};    // in waits that have ended, times the ranks that waited
  std::atomic<std::int64_t> since{0};    // when the present wait began; 0: there is none
  std::atomic<std::int64_t> ranks{0};    // that wait in it
};

struct Header {
  static constexpr std::size_t kBytes = 4096;
  static constexpr std::size_t kHosts = 64;

  char magic[8] = {'F', 'S', 'T', 'T', 'R', 'A', 'C', 'E'};
  std::uint32_t layout = kLayout;
  std::uint32_t slotBytes = 0;
  std::uint64_t slots = 0;                    // a power of two
  std::uint64_t kept = 0;                     // how many records the ring keeps
  std::uint64_t texts = 0;                    // offset of the texts
  std::int64_t pid = 0;                       // in this process's namespace
  std::int64_t firstTicks = 0;                // the same moment by two clocks
  std::int64_t firstNanos = 0;                // CLOCK_MONOTONIC
  std::int64_t dumpTicks = 0;                 // in a dump: the moment of the copy, by three
  std::int64_t dumpNanos = 0;                 // CLOCK_MONOTONIC
  std::int64_t dumpWall = 0;                  // CLOCK_REALTIME
  std::atomic<std::int64_t> rank{0};          // in the whole job
  std::atomic<std::uint64_t> records{0};      // ever made: the number of the last one
  std::atomic<std::uint64_t> jsonVersion{0};  // of the JSON; odd while it changes place
  std::atomic<std::uint64_t> jsonOffset{0};
  std::atomic<std::uint64_t> jsonBytes{0};
  std::atomic<std::uint64_t> end{0};  // of the texts
  char reason[64] = {};               // in a dump: why it was written
  HostWaits hosts[kHosts];            // in use from the first on
};
static_assert(sizeof(Header) <= Header::kBytes);

class Memory {
 public:
  /// Room for this many slots. Where no file can be made, no other process can read it.
  Memory(std::size_t slots, std::size_t slotBytes);
  ~Memory();
  Memory(const Memory&) = delete;
  Memory& operator=(const Memory&) = delete;

  Header& header() const { return *reinterpret_cast<Header*>(base_); }
  void* slots() const { return base_ + Header::kBytes; }
  /// Adds a text for good. Returns its place, in units of 8 bytes; 0 if there is no room. One
  /// thread at a time, as setJson().
  std::uint32_t add(std::string_view text);
  void setJson(std::string_view json);
  /// All texts, as in the memory.
  std::string_view texts() const {
    return {reinterpret_cast<const char*>(base_) + header().texts, header().end - header().texts};
  }

 private:
  std::size_t reserve(std::size_t bytes);

  std::uint8_t* base_ = nullptr;
  int fd_ = -1;
  std::size_t bytes_ = 0;   // of address space
  std::size_t backed_ = 0;  // memory is reserved up to here
  struct Extent {
    std::size_t offset = 0;
    std::size_t bytes = 0;
  } json_[2];  // in turns
};

}  // namespace fastcoll::trace
