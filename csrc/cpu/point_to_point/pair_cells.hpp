// Memory that two ranks pass back and forth: a few cells for each pair.
//
// To write a line that a peer has read is slow, because the line is in the peer's cache. To write a
// line that the own core has read last is fast, and between cores without a common cache it is
// several times as fast. So a cell passes to the receiver with a record. The receiver copies the
// payload out of it, and writes it when it next sends to that peer. In an exchange of long
// messages, a rank that waits takes a piece after each that it sends. So a few cells, which stay in
// the caches, serve messages of any length.
//
// A cell comes back in no other way. Messages in one direction soon find none, and use the ring.
// Each rank begins with the cells of its own block. Only the rank that holds a cell touches it; the
// record that passes it orders the two ranks' accesses. A rank that has closed the group keeps its
// block until the peer has left or died, because the peer may still send into it.
#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>

namespace fastcoll {

/// The cells that this rank holds, for one peer. One thread at a time uses it.
class PairCells {
 public:
  /// A piece is so long that its hand-over costs little compared with its copy. It is so short that
  /// the receiver copies one piece while the sender writes the next.
  static constexpr std::size_t kBytes = 64 * 1024;

  /// Number of cells beside a ring of `ringBytes`, and their bytes.
  static std::size_t countFor(std::size_t ringBytes) {
    return std::min(ringBytes / (8 * kBytes), kMost);
  }
  static std::size_t blockBytes(std::size_t ringBytes) { return countFor(ringBytes) * kStride; }

  /// This rank's block, of whose cells it now holds all.
  void addOwn(std::uint8_t* data, std::size_t count) {
    blocks_[0] = data;
    count_ = count;
    // Those that it has read already are taken first.
    const std::size_t read = std::min(held_, kMost);
    std::copy_backward(numbers_.begin(), numbers_.begin() + read, numbers_.begin() + read + count);
    for (std::size_t cell = 0; cell < count; ++cell) {
      numbers_[cell] = static_cast<std::uint8_t>(cell + 1);
    }
    held_ = read + count;
  }
  void addPeers(std::uint8_t* data, std::size_t count) {
    blocks_[1] = data;
    count_ = count;
  }

  /// Takes the cell that this rank has read last, or a new one: its number, or 0 if it holds none.
  std::uint8_t take() { return held_ == 0 ? std::uint8_t{0} : numbers_[--held_]; }
  /// The memory of a cell of this rank's numbering; nullptr if there is no such cell.
  std::uint8_t* at(std::uint8_t number) const {
    const std::size_t index = number - 1;
    if (number == 0 || index >= 2 * count_) return nullptr;
    std::uint8_t* const block = blocks_[index / count_];
    return block == nullptr ? nullptr : block + index % count_ * kStride;
  }
  /// The number here of a cell that a record of the peer names; 0 if there is no such cell. The
  /// peer counts its own block's cells first, too.
  std::uint8_t numberOf(std::uint8_t peers) const {
    if (peers == 0 || peers > 2 * count_) return 0;
    return static_cast<std::uint8_t>(peers > count_ ? peers - count_ : peers + count_);
  }
  /// This rank has read the cell, which the peer no longer touches.
  void keep(std::uint8_t number) {
    if (held_ < numbers_.size()) numbers_[held_++] = number;  // more only if the peer is broken
  }

 private:
  static constexpr std::size_t kMost = 4;  // cells of a block
  /// Not a multiple of a page: else all cells compete for the same places of a cache.
  static constexpr std::size_t kStride = kBytes + 64;

  std::array<std::uint8_t*, 2> blocks_{};  // own, the peer's
  std::size_t count_ = 0;                  // cells of a block
  std::array<std::uint8_t, 2 * kMost> numbers_{};
  std::size_t held_ = 0;  // so many of `numbers_`, in the order in which they were read
};

}  // namespace fastcoll
