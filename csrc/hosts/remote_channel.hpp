// Point-to-point's way to a rank on another host: the records of a PairChannel, both ways, over a
// connection.
//
// A record goes to one of kSlots receives that its receiver posted beforehand, so that it is on its
// way at once; each record says how many the other side's were taken, which is what the other side
// may send again. The body of a message that is too long for a record travels by itself, from the
// sender's memory into the receiver's: the network lets it go when the receiver has posted its
// receive, which it does as soon as it has matched the message.
//
// One record, because each costs the receiver a wake-up, which takes longer than a copy of 256 KiB;
// and not longer, because then the round trip that the body waits for is little beside it.
#pragma once

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>

#include "../network/connection.hpp"
#include "../transport/message.hpp"
#include "../transport/pair_channel.hpp"

namespace fastcoll {

class RemoteChannel {
 public:
  static constexpr std::size_t kPayloadBytes = std::size_t{256} << 10;
  static constexpr std::uint64_t kSlots = 8;

  explicit RemoteChannel(std::unique_ptr<Connection> connection);
  ~RemoteChannel();

  // The caller's lock guards everything but wait(). All may throw ConnectionLost.

  /// A record may be written now.
  bool fits() const { return written_ - heard_ < kSlots; }
  /// Sends a record of `head` and `head.length` bytes of the message from `offset` on.
  void write(const RecordHead& head, const Message& message, std::size_t offset);
  /// Whether the peer wants nothing unasked any more, and what it is told of this rank with the
  /// next record.
  bool peerIsFull() const { return peerIsFull_; }
  void setFull(bool full) { full_ = full; }
  /// Sends the last record: nothing follows.
  void sayGoodbye();
  /// Waits until the network has taken all records; false when `until` passed first.
  bool flush(TimePoint until);

  /// Waits until the next record has come; false when `until` passed first. Of one thread at a
  /// time, without the lock; nobody else reads meanwhile.
  bool wait(TimePoint until);
  /// The record that wait() has told of.
  RecordHead head() const;
  const std::uint8_t* payload() const;
  /// Takes it.
  void advance();
  bool heardGoodbye() const { return goodbye_; }

  /// What remains of the message of this number.
  TransferRef sendBody(std::uint64_t number, const void* data, std::size_t bytes);
  TransferRef receiveBody(std::uint64_t number, void* data, std::size_t bytes);

  /// A message of a collective, to a receive of its length.
  TransferRef sendLong(const void* data, std::size_t bytes);
  TransferRef receiveLong(void* data, std::size_t bytes);

 private:
  // A rank tells what it has taken when it has taken so many, if nothing else goes that way.
  static constexpr std::uint64_t kTellAfter = kSlots / 2;
  // Records that need no leave: of two words of what was taken, and a goodbye.
  static constexpr std::uint64_t kFreeSlots = 4;
  static constexpr std::uint64_t kReceives = kSlots + kFreeSlots;

  struct Head;
  struct Slot {
    std::unique_ptr<std::uint8_t[]> data;
    TransferRef transfer;
  };

  void post(Slot& slot);
  void clear(Slot& slot, std::size_t room) const;
  void put(Slot& slot, const RecordHead& head);
  void say(PairRecord::Kind word);

  std::unique_ptr<Connection> connection_;
  std::array<Slot, kSlots> out_;
  std::array<Slot, kFreeSlots> words_;
  std::array<Slot, kReceives> in_;
  std::uint64_t written_ = 0;  // records that need leave
  std::uint64_t heard_ = 0;    // of them, taken by the peer
  std::uint64_t wordsSaid_ = 0;
  std::uint64_t read_ = 0;   // the peer's records, of either kind
  std::uint64_t taken_ = 0;  // of them, those that need leave
  std::uint64_t told_ = 0;   // of them, told to the peer
  bool goodbye_ = false;
  bool full_ = false;
  bool peerIsFull_ = false;
  std::string gone_;  // why a receive could not be posted
};

}  // namespace fastcoll
