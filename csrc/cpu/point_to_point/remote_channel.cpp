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

RemoteChannel::~RemoteChannel() {
  for (Slot& slot : out_) slot.transfer.reset();
  for (Slot& slot : words_) slot.transfer.reset();
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
    gone_ = error.what();
  }
}

/// Prepares the slot for a record. The peer has received what was last sent from the slot. So the
/// network has completed that send, or is about to.
void RemoteChannel::clear(Slot& slot, std::size_t room) const {
  if (slot.transfer != nullptr && !slot.transfer->wait(Clock::now() + kNotice)) {
    throw ConnectionLost(ErrorKind::Backend,
                         "the network has not completed a send that the peer has received");
  }
  slot.transfer.reset();
  if (slot.data == nullptr) slot.data.reset(new std::uint8_t[sizeof(Head) + room]);
}

/// Sends `head`, and the `head.length` bytes after its place in the slot.
void RemoteChannel::put(Slot& slot, const RecordHead& head) {
  const Head wire{head, taken_, full_};
  std::memcpy(slot.data.get(), &wire, sizeof wire);
  slot.transfer = connection_->send(slot.data.get(), sizeof wire + head.length, kRecords);
  told_ = taken_;
}

void RemoteChannel::write(const RecordHead& head, const Message& message, std::size_t offset) {
  Slot& slot = out_[written_ % kSlots];
  clear(slot, kPayloadBytes);
  message.read(offset, head.length, slot.data.get() + sizeof(Head));
  put(slot, head);
  ++written_;
}

void RemoteChannel::say(RecordHead::Kind word) {
  Slot& slot = words_[wordsSaid_++ % kFreeSlots];
  clear(slot, 0);
  RecordHead head{};
  head.kind = word;
  put(slot, head);
}

void RemoteChannel::sayGoodbye() {
  say(RecordHead::kGoodbye);
}

bool RemoteChannel::sent() {
  const auto ended = [](Slot& slot) {
    if (slot.transfer != nullptr && !slot.transfer->wait(Clock::now())) return false;
    slot.transfer.reset();
    return true;
  };
  return std::ranges::all_of(out_, ended) && std::ranges::all_of(words_, ended);
}

bool RemoteChannel::wait(TimePoint until) {
  Slot& slot = in_[read_ % kReceives];
  if (slot.transfer == nullptr) throw ConnectionLost(ErrorKind::Backend, gone_);
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
  if (wire.taken > heard_ && wire.taken <= written_) heard_ = wire.taken;
  peerIsFull_ = wire.full != 0;
  goodbye_ = goodbye_ || wire.record.kind == RecordHead::kGoodbye;
  const bool word = wire.record.kind == RecordHead::kTaken || goodbye_;
  if (!word) ++taken_;
  post(slot);
  if (goodbye_ || taken_ - told_ < kTellAfter) return;
  try {
    say(RecordHead::kTaken);
  } catch (const ConnectionLost& error) {  // earlier records count
    gone_ = error.what();
  }
}

}  // namespace fastcoll
