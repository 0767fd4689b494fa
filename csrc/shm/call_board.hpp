// What a rank's device calls are, where the ranks of its host can see them. NCCL compares nothing:
// if two ranks make different calls, it hangs, or moves the wrong bytes. Here the ranks compare
// afterwards, off the way of the calls.
//
// A rank writes a line for each collective: its signature, and a history, which is a hash of all
// lines so far. Two ranks whose histories differ after the same number of lines have made different
// calls. They compare at the last line that both have, so the rank that is ahead needs its own
// older histories, which it keeps for itself.
#pragma once

#include <array>
#include <atomic>
#include <cstdint>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "shm/control_block.hpp"
#include "shm/group_memory.hpp"

namespace fastcoll {

class CallBoard {
 public:
  /// `members`: the ranks of this host, bound in `memory`, with this one.
  CallBoard(GroupMemory& memory, std::vector<int> members)
      : memory_(memory), members_(std::move(members)), compared_(memory.size(), 0) {
    memory_.keepForReaders();
  }

  /// Writes a line and returns its number, from 1. One thread at a time. `others`: a hash of what
  /// the signature does not have of the call. Of the signature, all but the seq is compared.
  std::uint64_t post(const Signature& signature, std::uint64_t others);
  /// How many lines a bound peer has written. Valid after the peer has left too.
  std::uint64_t countOf(int peer) const {
    return memory_.block(peer).calls.count.load(std::memory_order_acquire);
  }
  /// The peer's last call, "all_gather(seq 6, float32[10])"; "" if it has made none.
  std::string lastOf(int peer) const;
  /// Compares with all members. Returns the text of the error if a rank has made another call. One
  /// thread at a time.
  std::optional<std::string> mismatch();

 private:
  struct Line {
    std::uint64_t number = 0;
    std::uint64_t history = 0;
    Signature signature{};
  };
  std::uint64_t ownCount() const {
    const std::lock_guard<std::mutex> lock(mutex_);
    return count_;
  }
  std::optional<Line> ownLine(std::uint64_t number) const;
  std::optional<Line> lineOf(int peer, std::uint64_t number) const;
  std::string difference(int peer, std::uint64_t number) const;

  static constexpr std::size_t kKept = 1024;

  GroupMemory& memory_;
  const std::vector<int> members_;
  mutable std::mutex mutex_;  // guards the lines kept here
  std::uint64_t count_ = 0;
  std::array<Line, kKept> kept_{};
  std::vector<std::uint64_t> compared_;  // the number of lines at which each peer's were equal
};

}  // namespace fastcoll
