// The last N records of a process, written by any thread and read at any moment.
//
// No thread blocks. A slot has a version: twice the number of its record, plus one during a write.
// A reader copies the slot and then checks the version again. A writer that meets another one in
// its slot retries for a moment, then drops its event. All words are atomic, so a copy during a
// write is a retry and not a data race.
#pragma once

#include <atomic>
#include <cstdint>
#include <vector>

#include "trace/memory.hpp"
#include "trace/record.hpp"

namespace fastcoll::trace {

class Ring {
 public:
  explicit Ring(std::size_t size);

  /// Writes a record with this sequence number, scheduled or started. Returns its number; 0 if the
  /// slot was busy.
  RecordId add(const Record& draft, std::uint64_t seq, bool starts);
  /// These change fields of a record. They do nothing if it has been overwritten since.
  void start(RecordId id, std::int64_t now);
  void end(RecordId id, State state, std::int64_t now, Digests digests = {});
  void setMessage(RecordId id, std::int64_t peer, std::uint64_t seq);

  /// The group number in a record; 0 if the record has been overwritten.
  std::uint32_t groupOf(RecordId id) const;
  /// Copies the readable records of the last `size()`, oldest first.
  std::vector<Record> read() const;
  std::size_t size() const { return size_; }
  /// The number of the last record made.
  RecordId last() const { return next_.load(std::memory_order_relaxed); }
  /// Has the slots.
  Memory& memory() { return memory_; }
  /// The slots as read() finds them: those that cannot be read are empty.
  std::string copy() const;

 private:
  static constexpr std::size_t kWords = sizeof(Record) / 8;
  struct alignas(64) Slot {
    std::atomic<std::uint64_t> version{0};
    std::atomic<std::uint64_t> words[kWords];
  };
  /// Exclusive write access to a record's slot, released by the destructor.
  class Claim;

  Slot& slotOf(RecordId id) const { return slots_[id & mask_]; }
  bool read(RecordId id, Record& record) const;

  const std::size_t size_;
  const std::size_t mask_;  // slots are a power of two, `size_` or more
  Memory memory_;
  Slot* const slots_;
  std::atomic<RecordId>& next_;
};

}  // namespace fastcoll::trace
