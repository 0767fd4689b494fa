#include "cpu/point_to_point/remote_channel.hpp"

#include <algorithm>
#include <cstring>
#include <utility>

namespace fastcoll {
namespace {

constexpr int kRecords = 0;  // tag of records; bodies have those from 1 on, then long messages
constexpr std::uint64_t kBodyTags = std::uint64_t{1} << 30;
constexpr std::uint64_t kLongTags = kBodyTags - 2;
// Time for the network to complete a send that the peer has already received.
constexpr Milliseconds kNotice{1000};

}  // namespace

int RemoteChannel::bodyTag(std::uint64_t number) {
  return static_cast<int>(1 + number % kBodyTags);
}

int RemoteChannel::longTag(std::uint64_t bytes) {
  return static_cast<int>(1 + kBodyTags + bytes % kLongTags);
}

/// What precedes a record's payload on the wire.
struct RemoteChannel::Head {
  RecordHead record;
  std::uint64_t taken;
  std::uint64_t full;
};

RemoteChannel::RemoteChannel(std::unique_ptr<Connection> connection)
    : connection_(std::move(connection)) {
  for (Slot& slot : in_) {
    slot.data.reset(new std::uint8_t[sizeof(Head) + kPayloadBytes]);
    post(slot);
  }
}

void RemoteChannel::close() {
  takeSends(true);
  for (Slot& slot : in_) slot.transfer.reset();
  connection_.reset();
}

/// Posts a receive in the slot. If the peer has left, the reader reports it after the earlier
/// records.
void RemoteChannel::post(Slot& slot) {
  slot.transfer.reset();
  try {
    slot.transfer = connection_->receive(slot.data.get(), sizeof(Head) + kPayloadBytes, kRecords);
  } catch (const ConnectionLost& error) {
    lost_ = error.what();
  }
}

/// Sends a record from a slot that no send uses.
void RemoteChannel::put(Slot& slot, const RecordHead& head, const Message& message,
                        std::size_t offset) {
  const bool record = head.kind == RecordHead::kMessage;
  if (slot.data == nullptr) {
    slot.data.reset(new std::uint8_t[sizeof(Head) + (record ? kPayloadBytes : 0)]);
  }
  const Head wire{head, taken_, full_};
  std::memcpy(slot.data.get(), &wire, sizeof wire);
  if (head.length > 0) message.read(offset, head.length, slot.data.get() + sizeof wire);
  slot.transfer = connection_->send(slot.data.get(), sizeof wire + head.length, kRecords);
  returned_ = taken_;
}

void RemoteChannel::write(const RecordHead& head, const Message& message, std::size_t offset) {
  put(out_[written_ % kSlots], head, message, offset);
  ++written_;
}

/// How many of this rank's records the peer has taken, by its record.
std::uint64_t RemoteChannel::acknowledgedBy(const Head& wire) const {
  return wire.taken <= written_ ? std::max(wire.taken, acknowledged_) : acknowledged_;
}

std::vector<TransferRef> RemoteChannel::takeSends(bool all) {
  std::vector<TransferRef> sends;
  const auto take = [&sends](Slot& slot) {
    if (slot.transfer != nullptr) sends.push_back(std::move(slot.transfer));
  };
  if (all) {
    for (Slot& slot : out_) take(slot);
    for (Slot& slot : credits_) take(slot);
    take(close_);
    return sends;
  }
  Head wire;
  std::memcpy(&wire, in_[read_ % kReceives].data.get(), sizeof wire);
  for (auto n = acknowledged_; n < acknowledgedBy(wire); ++n) take(out_[n % kSlots]);
  // The slot of the next credit return. kFreeSlots - 1 others came after its last one, each after
  // kReturnAfter more of the peer's records. The peer has received the last one, because without it
  // the peer would have had no credit for so many records.
  static_assert((kFreeSlots - 1) * kReturnAfter >= kSlots);
  take(credits_[creditsSent_ % kFreeSlots]);
  return sends;
}

void RemoteChannel::awaitReceived(const std::vector<TransferRef>& sends) {
  // The network has completed them, or is about to.
  for (const TransferRef& send : sends) {
    if (send->wait(Clock::now() + kNotice)) continue;
    throw ConnectionLost(ErrorKind::Backend,
                         "the network has not completed a send that the peer has received");
  }
}

bool RemoteChannel::wait(TimePoint until) {
  Slot& slot = in_[read_ % kReceives];
  if (slot.transfer == nullptr) throw ConnectionLost(ErrorKind::Backend, lost_);
  return slot.transfer->wait(until);
}

RecordHead RemoteChannel::head() const {
  RecordHead head;
  std::memcpy(&head, in_[read_ % kReceives].data.get(), sizeof head);
  head.where = 0;
  return head;
}

const std::uint8_t* RemoteChannel::payload() const {
  return in_[read_ % kReceives].data.get() + sizeof(Head);
}

void RemoteChannel::advance() {
  Slot& slot = in_[read_++ % kReceives];
  Head wire;
  std::memcpy(&wire, slot.data.get(), sizeof wire);
  acknowledged_ = acknowledgedBy(wire);
  peerIsFull_ = wire.full != 0;
  peerClosed_ = peerClosed_ || wire.record.kind == RecordHead::kClose;
  if (wire.record.kind == RecordHead::kMessage) ++taken_;
  post(slot);
  if (peerClosed_ || taken_ - returned_ < kReturnAfter) return;
  try {
    put(credits_[creditsSent_++ % kFreeSlots], {.kind = RecordHead::kCredit});
  } catch (const ConnectionLost& error) {  // earlier records count
    lost_ = error.what();
  }
}

}  // namespace fastcoll
