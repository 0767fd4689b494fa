// The two ends of a PairChannel's ring: the sender writes records at one, and the receiver reads
// them at the other. Neither end waits or locks, because one thread at a time uses it.
#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <utility>

#include "cpu/point_to_point/pair_cells.hpp"
#include "cpu/point_to_point/pair_channel.hpp"
#include "shm/message.hpp"
#include "shm/ring_stores.hpp"

namespace fastcoll {

/// The present ring, as each end has it. Positions count bytes since the channel began. `base` is
/// the position of the present ring's first byte.
struct PairRing {
  std::uint8_t* data = nullptr;
  std::size_t bytes = 0;  // a multiple of PairRecord::kLine
  std::uint64_t base = 0;

  PairRecord& record(std::uint64_t position) const {
    return *reinterpret_cast<PairRecord*>(data + (position - base) % bytes);
  }
  /// Calls use(address, bytes) for the one or two runs of [position, position + length).
  template <typename Use>
  void visit(std::uint64_t position, std::size_t length, Use use) const {
    const std::size_t start = (position - base) % bytes;
    const std::size_t first = std::min(length, bytes - start);
    if (first > 0) use(data + start, first);
    if (length > first) use(data, length - first);
  }
};

/// The one or two runs of a record's payload.
using RecordBytes = std::array<std::pair<const std::uint8_t*, std::size_t>, 2>;

/// One end of a channel.
class PairEnd {
 public:
  PairEnd(PairChannel& channel, PairCells& cells)
      : channel_(channel), ring_{channel.ring, PairChannel::kFirstRingBytes, 0}, cells_(cells) {}

 protected:
  PairChannel& channel_;
  PairRing ring_;
  std::uint64_t position_ = 0;
  PairCells& cells_;
};

class PairWriter : PairEnd {
 public:
  using PairEnd::PairEnd;

  /// Whether a record with `length` bytes of payload can be written now.
  bool fits(std::size_t length) {
    // write() also clears the line behind the record, so that line must be free too.
    const std::size_t need = PairRecord::size(length) + PairRecord::kLine;
    if (position_ + need <= free_) return true;
    // Acquire: the receiver's reads of this memory come before the new record's writes.
    const std::uint64_t drained = channel_.drained.load(std::memory_order_acquire);
    free_ = std::max(drained, ring_.base) + ring_.bytes;
    return position_ + need <= free_;
  }

  /// Writes a record that fits: the fields of `head`, then `head.length` bytes of the message from
  /// `offset` on.
  void write(const RecordHead& head, const Message& message, std::size_t offset) {
    PairRecord& record = ring_.record(position_);
    std::uint8_t line[sizeof record.fields + sizeof record.payload] = {};  // all after `kind`
    std::memcpy(line, reinterpret_cast<const char*>(&head) + sizeof head.kind,
                sizeof record.fields);
    if (head.length <= PairRecord::kInlineBytes) {
      message.read(offset, head.length, line + sizeof record.fields);
    } else {
      writePayload(head, message, offset);
    }
    position_ += PairRecord::size(head);
    ring_.record(position_).kind.store(RecordHead::kNone, std::memory_order_relaxed);
    // This line is written last and at once, because the receiver polls it and may take it half
    // written.
    std::memcpy(reinterpret_cast<std::uint8_t*>(&record) + sizeof record.kind, line, sizeof line);
    // Release publishes payload, fields and the cleared line; copyStreaming has ordered its stores
    // before this one. It is seq_cst, because the sender then reads whether the receiver sleeps.
    record.kind.store(head.kind, std::memory_order_seq_cst);
    // Fetch the line that the next record clears now, not between its payload and its publication.
    __builtin_prefetch(&ring_.record(position_ + PairRecord::kLine), 1);
  }

  /// Continues in another ring, at `offset` of the sender's arena. A record without payload must
  /// fit.
  void move(std::uint8_t* data, std::size_t bytes, std::uint64_t offset, const RingStores& stores) {
    write({.kind = RecordHead::kMove, .bytes = bytes, .where = offset}, Message(), 0);
    ring_ = {data, bytes, position_};
    stores_ = stores;
    free_ = position_ + bytes;
  }

  /// Whether the receiver has taken all records.
  bool taken() const { return channel_.drained.load(std::memory_order_acquire) == position_; }

 private:
  /// Writes a payload that does not fit in its record's line.
  [[gnu::noinline]] void writePayload(const RecordHead& head, const Message& message,
                                      std::size_t offset) {
    if (head.cell != 0) return message.read(offset, head.length, cells_.at(head.cell));
    stores_.fill(head.length, [&](bool streaming) {
      ring_.visit(position_ + PairRecord::kLine, head.length, [&](std::uint8_t* to, std::size_t n) {
        message.read(offset, n, to, streaming);
        offset += n;
      });
      return std::size_t{head.length};
    });
  }

  RingStores stores_;                                  // plain in the small ring
  std::uint64_t free_ = PairChannel::kFirstRingBytes;  // end of the room, by the last `drained`
};

class PairReader : PairEnd {
 public:
  using PairEnd::PairEnd;

  /// The next record, or nullptr while there is none.
  const PairRecord* next() const {
    const PairRecord& record = ring_.record(position_);
    return record.kind.load(std::memory_order_acquire) == RecordHead::kNone ? nullptr : &record;
  }
  /// Its fields, read once, because a broken peer may overwrite them.
  RecordHead head(const PairRecord& record) const {
    RecordHead head;
    head.kind = static_cast<RecordHead::Kind>(record.kind.load(std::memory_order_relaxed));
    std::memcpy(reinterpret_cast<char*>(&head) + sizeof head.kind, record.fields,
                sizeof record.fields);
    return head;
  }
  /// Whether the next record's payload can be where the record says.
  bool sound(const RecordHead& head) const {
    if (head.cell == 0) return head.length <= ring_.bytes - 2 * PairRecord::kLine;
    return head.length <= PairCells::kBytes && cells_.at(cells_.numberOf(head.cell)) != nullptr;
  }
  /// The runs of the next record's payload, if it is sound.
  RecordBytes payload(const PairRecord& record, const RecordHead& head) const {
    const std::size_t length = head.length;
    if (length <= PairRecord::kInlineBytes) return {{{record.payload, length}, {nullptr, 0}}};
    if (head.cell != 0) return {{{cells_.at(cells_.numberOf(head.cell)), length}, {nullptr, 0}}};
    RecordBytes runs{};
    std::size_t run = 0;
    ring_.visit(position_ + PairRecord::kLine, length,
                [&](const std::uint8_t* from, std::size_t n) { runs[run++] = {from, n}; });
    return runs;
  }
  void advance(const RecordHead& head) {
    position_ += PairRecord::size(head);
    if (head.cell != 0) cells_.keep(cells_.numberOf(head.cell));
  }
  /// Continues in another ring.
  void move(std::uint8_t* data, std::size_t bytes) { ring_ = {data, bytes, position_}; }
  /// Frees the room of all records taken so far. seq_cst, because this rank then reads whether the
  /// sender sleeps.
  void release() { channel_.drained.store(position_, std::memory_order_seq_cst); }
};

}  // namespace fastcoll
