// The last N records of a process, written by any thread and read at any moment.
//
// Nobody waits for anybody: a slot has a version, twice the number of its record, and one more
// while somebody writes to it. A reader copies and looks again; a writer that meets another one in
// the same slot tries for a moment and gives up, which loses one event of the trace. All words are
// atomic, so that a copy taken in the middle of a write is a retry and not a data race.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <vector>

#include "record.hpp"

namespace fastcoll::trace {

class Ring {
 public:
  explicit Ring(std::size_t size);

  /// Writes a record, scheduled or started under this number; 0 if the slot could not be had.
  RecordId add(const Record& draft, std::uint64_t seq, bool starts);
  /// These change fields of a record; nothing happens if it has been overwritten since.
  void start(RecordId id, std::int64_t now);
  void end(RecordId id, State state, std::int64_t now);
  void setMessage(RecordId id, std::int64_t peer, std::uint64_t seq);

  /// The group that a record names; 0 if it has been overwritten.
  std::uint32_t groupOf(RecordId id) const;
  /// Copies the last `size()` records that are there, oldest first.
  std::vector<Record> read() const;
  std::size_t size() const { return size_; }
  /// The number of the last record made.
  RecordId last() const { return next_.load(std::memory_order_relaxed); }

 private:
  static constexpr std::size_t kWords = sizeof(Record) / 8;
  struct alignas(64) Slot {
    std::atomic<std::uint64_t> version{0};
    std::atomic<std::uint64_t> words[kWords];
  };
  /// The slot of a record, for one who has the right to write; gives it back when it goes.
  class Claim;

  Slot& slotOf(RecordId id) const { return slots_[id & mask_]; }

  const std::size_t size_;
  const std::size_t mask_;  // slots are a power of two, and some are spare
  std::unique_ptr<Slot[]> slots_;
  std::atomic<RecordId> next_{0};
};

}  // namespace fastcoll::trace
