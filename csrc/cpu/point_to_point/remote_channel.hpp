// The channel of point-to-point to a rank on another host: the records of a PairChannel, in both
// directions, over a connection.
//
// A record goes to one of kReceives receives that its receiver posted in advance, so it is sent at
// once. Each record returns credits: it counts the records that were taken, whose slots the other
// side may use again. The body of a message too long for a record goes separately, from the
// sender's memory to the receiver's. The network sends it once the receiver has posted its receive,
// as soon as it has matched the message.
//
// A message up to kPayloadBytes is one record, because each record costs the receiver a wake-up.
// That takes longer than a copy of 256 KiB. For a longer message, the round trip that its body
// waits for costs little in comparison.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "cpu/point_to_point/pair_channel.hpp"
#include "network/connection.hpp"
#include "shm/message.hpp"

namespace fastcoll {

class RemoteChannel {
 public:
  static constexpr std::size_t kPayloadBytes = std::size_t{256} << 10;
  static constexpr std::uint64_t kSlots = 8;

  explicit RemoteChannel(std::unique_ptr<Connection> connection);
  ~RemoteChannel() { close(); }

  // The caller's lock guards everything but the two waits. All may throw ConnectionLost.

  /// Whether a record may be written now.
  bool fits() const { return written_ - acknowledged_ < kSlots; }
  /// Sends a record of `head` and `head.length` bytes of the message from `offset` on.
  void write(const RecordHead& head, const Message& message, std::size_t offset);
  /// Whether the peer wants no more eager data. setFull(): what the next record reports to it of
  /// this rank.
  bool peerIsFull() const { return peerIsFull_; }
  void setFull(bool full) { full_ = full; }
  /// Sends the close notice, the last record.
  void sendClose() { put(close_, {.kind = RecordHead::kClose}); }

  /// Waits until the next record has arrived; false when `until` passed first. Call from one thread
  /// at a time, without the lock; no other thread reads meanwhile.
  bool wait(TimePoint until);
  /// The sends of which that record shows that the peer has received them; or `all`. Without the
  /// lock, wait for them with awaitReceived(): their slots are used again after advance().
  std::vector<TransferRef> takeSends(bool all);
  static void awaitReceived(const std::vector<TransferRef>& sends);
  /// The record that wait() has found.
  RecordHead head() const;
  const std::uint8_t* payload() const;
  /// Takes the record.
  void advance();
  bool peerClosed() const { return peerClosed_; }

  /// For transfers beside the records.
  Connection& connection() { return *connection_; }
  /// Ends all transfers. Only peerClosed() may be called afterwards.
  void close();
  /// The tag of the body of the message of this number.
  static int bodyTag(std::uint64_t number);
  /// The tag of a message of a collective, which goes to a receive of its length.
  static int longTag(std::uint64_t bytes);

 private:
  // A rank that sends no record returns credits after it has taken this many.
  static constexpr std::uint64_t kReturnAfter = kSlots / 2;
  // Receives for what needs no credit: credit returns and a close notice.
  static constexpr std::uint64_t kFreeSlots = 4;
  static constexpr std::uint64_t kReceives = kSlots + kFreeSlots;

  struct Head;
  struct Slot {
    std::unique_ptr<std::uint8_t[]> data;
    TransferRef transfer;
  };

  void post(Slot& slot);
  void put(Slot& slot, const RecordHead& head, const Message& message = {}, std::size_t offset = 0);
  std::uint64_t acknowledgedBy(const Head& wire) const;

  std::unique_ptr<Connection> connection_;
  std::array<Slot, kSlots> out_;
  std::array<Slot, kFreeSlots> credits_;
  Slot close_;
  std::array<Slot, kReceives> in_;
  std::uint64_t written_ = 0;       // records that need credit
  std::uint64_t acknowledged_ = 0;  // of them, taken by the peer
  std::uint64_t creditsSent_ = 0;   // records that only return credits
  std::uint64_t read_ = 0;          // the peer's records, of any kind
  std::uint64_t taken_ = 0;         // of them, those that need credit
  std::uint64_t returned_ = 0;      // of them, returned to the peer as credits
  bool peerClosed_ = false;
  bool full_ = false;
  bool peerIsFull_ = false;
  std::string lost_;  // why a receive could not be posted
};

}  // namespace fastcoll
