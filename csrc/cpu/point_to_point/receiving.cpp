// The receiving end of point-to-point: matches records to receives, or keeps them for later
// receives. All of it runs under PointToPoint's lock and never waits; see pair_channel.hpp for the
// protocol.
#include <algorithm>
#include <cstring>
#include <utility>

#include "cpu/point_to_point/point_to_point.hpp"

namespace fastcoll {
namespace {

// A message of more than kCheapBytes waits in the ring for its receive, for kPatience at most.
constexpr std::size_t kCheapBytes = 4096;
constexpr std::chrono::microseconds kPatience{200};
// Bytes of unexpected messages beyond which senders must keep all but small messages.
constexpr std::size_t kHeldBytes = std::size_t{16} << 20;

}  // namespace

bool PointToPoint::takeRecords(int rank) {
  Peer& peer = peers_[rank];
  PairReader& in = *peer.in;
  std::size_t budget = kTurnBytes;
  bool took = false;
  while (budget > 0) {
    const PairRecord* record = in.next();
    if (record == nullptr) break;
    const RecordHead head = in.head(*record);
    const std::size_t length = head.length;
    if (waitsForReceive(peer, head)) break;
    took = true;
    if (!in.sound(head)) {
      throwBroken(rank, " wrote a record of ", length, " bytes where there is no room for it");
    }
    switch (head.kind) {
      case RecordHead::kMessage:
        takeMessage(rank, head, in.payload(*record, head));
        in.advance(head);
        break;
      case RecordHead::kPiece:
        takePiece(rank, head, in.payload(*record, head));
        in.advance(head);
        break;
      case RecordHead::kMove: {
        const std::uint64_t bytes = head.bytes;
        if (bytes != ringBytes_) {
          throwBroken(rank, " announces a ring of ", bytes, " bytes");
        }
        std::uint8_t* const data = memory_.inPeer(rank, head.where, bytes);
        mapNow(data, bytes);
        in.advance(head);
        in.move(data, bytes);
        if (const std::uint64_t cells = peer.inChannel->cells.load(std::memory_order_relaxed)) {
          const std::size_t all = PairCells::blockBytes(bytes);
          std::uint8_t* const block = memory_.inPeer(rank, cells, all);
          mapNow(block, all);
          peer.cells.addPeers(block, PairCells::countFor(bytes));
        }
        break;
      }
      default:
        throwBroken(rank, " wrote a record of an unknown kind");
    }
    budget -= std::min(budget, PairRecord::kLine + length);
  }
  if (took) in.release();
  return took;
}

/// Whether to leave a message without a receive in the ring for a moment. In an exchange of isend
/// and irecv the receive is about to be posted. Keeping the message would be a second copy.
bool PointToPoint::waitsForReceive(Peer& peer, const RecordHead& head) {
  const bool message = head.kind == RecordHead::kMessage;
  if (!message || head.length <= kCheapBytes || peer.receives > 0 || anyReceives_ > 0) {
    peer.waitsSince.reset();
    return false;
  }
  const auto now = Clock::now();
  if (!peer.waitsSince) peer.waitsSince = now;
  if (now - *peer.waitsSince >= kPatience) {
    peer.waitsSince.reset();
    return false;
  }
  nextTurn_ =
      std::min(nextTurn_, *peer.waitsSince + kPatience);  // no peer may wake this rank by then
  return true;
}

void PointToPoint::takeMessage(int rank, const RecordHead& head, const RecordBytes& payload) {
  Peer& peer = peers_[rank];
  const std::size_t length = head.length;
  Unexpected message{rank, peer.arrived++, head};
  const bool small = head.bytes <= length;
  const bool odd = peer.place == Place::Elsewhere && length != (head.asks ? 0 : head.bytes);
  if (length > head.bytes || (!small && !head.asks && head.bytes > kEagerBytes) || odd) {
    throwBroken(rank, " sends ", length, " bytes of a message of ", head.bytes);
  }
  peer.latest = nullptr;
  PointToPointRef op = takeReceive(rank, head.tag);
  if (op == nullptr) {
    auto& waiting = unexpected_[hashOf(head.tag)];
    waiting.push_back(std::move(message));
    peer.latest = &waiting.back();
    if (length > 0) keep(waiting.back(), payload, length);
    return;
  }
  receive(op, message, payload);
}

void PointToPoint::takePiece(int rank, const RecordHead& head, const RecordBytes& payload) {
  Peer& peer = peers_[rank];
  const std::uint64_t number = head.where;
  const auto open =
      std::ranges::find_if(peer.open, [&](const auto& op) { return op->number_ == number; });
  if (open != peer.open.end()) {
    const PointToPointRef op = *open;
    if (head.length > op->unasked_ - op->moved_) {
      throwBroken(rank, " sends more than all of ", describe(*op));
    }
    store(*op, payload);
    if (op->moved_ < op->unasked_) return;
    peer.open.erase(open);
    finish(op);
    return;
  }
  // The sender writes such pieces before it begins another message.
  if (peer.latest == nullptr || peer.latest->number != number) {
    throwBroken(rank, " sends a piece of message ", number, ", which is not under way");
  }
  keep(*peer.latest, payload, head.length);
}

/// Takes the first posted receive that matches; nullptr if there is none.
PointToPointRef PointToPoint::takeReceive(int rank, int tag) {
  auto* const posted = receives_[hashOf(tag)].get();
  if (posted == nullptr) return nullptr;
  const auto match = std::ranges::find_if(*posted, [&](const PointToPointRef& op) {
    return (op->peer == rank || op->peer == kAnySource) && op->tag == tag;
  });
  if (match == posted->end()) return nullptr;
  const PointToPointRef op = *match;
  posted->erase(match);
  --(op->peer == kAnySource ? anyReceives_ : peers_[rank].receives);
  return op;
}

void PointToPoint::post(const PointToPointRef& op) {
  auto& posted = receives_[hashOf(op->tag)];
  if (posted == nullptr) posted = std::make_unique<std::deque<PointToPointRef>>();
  posted->push_back(op);
  ++(op->peer == kAnySource ? anyReceives_ : peers_[op->peer].receives);
}

bool PointToPoint::matchUnexpected(const PointToPointRef& op) {
  auto& waiting = unexpected_[hashOf(op->tag)];
  const auto match = std::ranges::find_if(waiting, [&](const Unexpected& message) {
    return (op->peer == message.source || op->peer == kAnySource) && op->tag == message.head.tag;
  });
  if (match == waiting.end()) return false;
  Unexpected*& latest = peers_[match->source].latest;
  if (latest == &*match) latest = nullptr;
  const Unexpected message = std::move(*match);
  waiting.erase(match);
  hold(-static_cast<std::ptrdiff_t>(message.held));
  try {
    receive(op, message, {{{message.payload.get(), message.held}}});
  } catch (const ConnectionLost& error) {
    noteLost(op->source, error.what());
  } catch (const Error& error) {
    fail(error.kind(), error.what());
  }
  return true;
}

/// Keeps the next record's payload for a later receive.
void PointToPoint::keep(Unexpected& message, const RecordBytes& payload, std::size_t length) {
  // Eager bytes are bounded, except that a message in one record always arrives whole.
  const std::size_t room = std::min<std::uint64_t>(
      message.head.bytes, std::max(std::min(kEagerBytes, ringBytes_ / 2), length));
  if (message.payload == nullptr) message.payload.reset(new std::uint8_t[room]);
  if (length > room - message.held) {
    throwBroken(message.source, " sent more bytes of a message than this rank requested");
  }
  for (const auto& [from, bytes] : payload) {
    if (bytes == 0) continue;
    std::memcpy(message.payload.get() + message.held, from, bytes);
    message.held += bytes;
  }
  hold(static_cast<std::ptrdiff_t>(length));
}

/// Counts the bytes of unexpected messages, and notifies the senders when there are too many.
void PointToPoint::hold(std::ptrdiff_t bytes) {
  held_ += bytes;
  const bool full = held_ > (full_ ? kHeldBytes / 2 : kHeldBytes);
  if (full == full_) return;
  full_ = full;
  for (int rank = 0; rank < memory_.size(); ++rank) {
    Peer& peer = peers_[rank];
    if (peer.remote.channel) peer.remote.channel->setFull(full);
    if (!peer.in || memory_.hasLeft(rank)) continue;
    peer.inChannel->full.store(full ? 1 : 0, std::memory_order_relaxed);
  }
}

/// Matches the message to the receive, which takes what has arrived of it. Ends the receive, or
/// arranges for the rest. Throws unless their dtypes and sizes agree.
void PointToPoint::receive(const PointToPointRef& op, const Unexpected& message,
                           const RecordBytes& payload) {
  op->source = message.source;
  op->number_ = message.number;
  op->unasked_ = message.head.bytes;
  trace::start(op->trace);
  const DType dtype = message.head.dtype;
  const auto total = op->message.bytes();
  if (message.head.bytes != total || dtype != op->dtype) {
    throw Error(ErrorKind::Backend, "Detected mismatch: rank ", memory_.rank(), " runs ",
                describe(*op), ", ", memory_.memberName(message.source), " sends ",
                dtypeName(dtype), "[", message.head.bytes / elementSize(dtype), "] with tag ",
                message.head.tag, ". Give both ends the same dtype and number of elements.");
  }
  store(*op, payload);
  if (op->moved_ == total) {
    finish(op);
    return;
  }
  Peer& peer = peers_[message.source];
  mayBeBusy_[message.source] = 1;
  if (peer.place == Place::Elsewhere) {
    receiveBody(*op);
    return;
  }
  if (message.head.where != 0) {
    peer.pulls.emplace_back(op, memory_.inPeer(message.source, message.head.where, total));
    return;
  }
  peer.open.push_back(op);
  if (message.head.asks) peer.wanted.push_back(message.number);
}

/// Writes the next bytes of the message to the receiver's memory.
void PointToPoint::store(PointToPointOp& op, const RecordBytes& payload) {
  for (const auto& [from, bytes] : payload) {
    if (bytes == 0) continue;
    op.message.write(op.moved_, bytes, from, op.message.bytes() >= setup_.streamingBytes);
    op.moved_ += bytes;
  }
}

/// Reads messages in place, in the sender's arena.
bool PointToPoint::pull(Peer& peer) {
  std::size_t budget = kPullBytes;
  bool moved = false;
  while (!peer.pulls.empty() && budget > 0) {
    const auto [op, from] = peer.pulls.front();
    const std::size_t take = std::min(budget, op->message.bytes() - op->moved_);
    store(*op, {{{from + op->moved_, take}}});
    budget -= take;
    moved = moved || take > 0;
    if (op->moved_ < op->message.bytes()) break;
    // The receive ends with its answer, so no answer is left when no operation is pending.
    if (!peer.wanted.empty()) answer(peer);
    if (!peer.wanted.empty() || !roomToAnswer(peer)) break;
    peer.pulls.pop_front();
    peer.wanted.push_back(op->number_);
    finish(op);  // throws after a fault: then nothing is answered
    answer(peer);
    moved = true;
  }
  return moved;
}

bool PointToPoint::roomToAnswer(const Peer& peer) const {
  // Acquire: the sender has read the answer whose place is reused.
  return peer.inChannel->answered.load(std::memory_order_relaxed) -
             peer.inChannel->answersRead.load(std::memory_order_acquire) <
         PairChannel::kAnswers;
}

/// Writes the answers for which there is room.
bool PointToPoint::answer(Peer& peer) {
  bool gave = false;
  while (!peer.wanted.empty() && roomToAnswer(peer)) {
    PairChannel& channel = *peer.inChannel;
    const std::uint64_t count = channel.answered.load(std::memory_order_relaxed);
    channel.answers[count % PairChannel::kAnswers].store(peer.wanted.front(),
                                                         std::memory_order_relaxed);
    // Release: the message was read before the answer is visible. seq_cst: only then check whether
    // the sender sleeps.
    channel.answered.store(count + 1, std::memory_order_seq_cst);
    peer.wanted.pop_front();
    gave = true;
  }
  return gave;
}

}  // namespace fastcoll
