// Point-to-point with ranks on other hosts: sends and receives over their channels. See
// remote_channel.hpp for the protocol.
//
// Threads wait on a channel without PointToPoint's lock, and count as its users. The network may
// use a message's memory while its body is in flight and the channel is open. So an operation that
// fails meanwhile completes only when the last user has left and the channel is closed.
#include <algorithm>

#include "base/interrupt.hpp"
#include "base/scoped_count.hpp"
#include "cpu/point_to_point/point_to_point.hpp"

namespace fastcoll {
namespace {

std::uint8_t* inOnePiece(const Message& message) {
  std::uint8_t* const start = message.contiguous(0, message.bytes());
  if (start == nullptr) {
    throw Error(ErrorKind::Backend, "internal error: expected a contiguous message", kReportThis);
  }
  return start;
}

}  // namespace

// --- sending -----------------------------------------------------------------------------------

bool PointToPoint::advanceRemote(int rank) {
  Peer& peer = peers_[rank];
  PeerConnection& remote = peer.remote;
  if (remote.isLost()) {
    noteLost(rank, remote.cause);
    return false;
  }
  if (!remote.isConnected()) {
    needPeers();
    return false;
  }
  bool moved = false;
  try {
    while (!peer.sends.empty() && remote.channel->fits()) {
      const PointToPointRef op = peer.sends.front();
      sendRemote(peer, *op);
      moved = true;
      peer.sends.pop_front();
      if (!op->bodyUnderWay_) end(op);
    }
  } catch (const ConnectionLost& error) {
    noteLost(rank, error.what());
  }
  return moved;
}

/// Writes the message's record, for which there is room. Starts the transfer of a separate body.
void PointToPoint::sendRemote(Peer& peer, PointToPointOp& op) {
  RemoteChannel& channel = *peer.remote.channel;
  const std::size_t bytes = op.message.bytes();
  RecordHead head = headOf(op);
  head.asks = bytes > (channel.peerIsFull() ? kRecordBytesWhenFull : kRecordBytes);
  if (!head.asks) head.length = static_cast<std::uint32_t>(bytes);
  channel.write(head, op.message, 0);
  noteBegun(peer, op);
  if (!head.asks) return;
  op.body_ =
      channel.connection().send(inOnePiece(op.message), bytes, RemoteChannel::bodyTag(op.number_));
  op.bodyUnderWay_ = true;
}

void PointToPoint::receiveBody(PointToPointOp& op) {
  op.body_ = peers_[op.source].remote.channel->connection().receive(
      inOnePiece(op.message), op.message.bytes(), RemoteChannel::bodyTag(op.number_));
  op.bodyUnderWay_ = true;
}

/// Waits for the message's body without the lock, and ends the operation with it.
void PointToPoint::awaitBody(const PointToPointRef& op, TimePoint until, Lock& lock) {
  const int rank = op->other();
  PeerConnection& remote = peers_[rank].remote;
  op->bodyAwaited_ = true;
  bool ended = false;
  try {
    ended = withoutLock(remote, lock, [&] { return op->body_->wait(until); });
  } catch (const ConnectionLost& error) {
    // If the peer's close notice has arrived before, the peer has left and is not lost.
    while (remote.mayRead() && !failing() && !stopping_) {
      if (!read(rank, Clock::now(), lock)) break;
    }
    noteLost(rank, error.what());
  }
  op->bodyAwaited_ = false;
  if (ended && !failing()) {
    op->body_.reset();
    op->bodyUnderWay_ = false;
    end(op);
  }
  leave(lock);
}

// --- receiving ---------------------------------------------------------------------------------

/// Waits for the peer's next record without the lock, and takes what has arrived. False if none
/// has.
bool PointToPoint::read(int rank, TimePoint until, Lock& lock) {
  PeerConnection& remote = peers_[rank].remote;
  RemoteChannel& channel = *remote.channel;
  remote.reading = true;
  bool came = false;
  try {
    came = withoutLock(remote, lock, [&] { return channel.wait(until); });
    if (came) {
      const auto sends = channel.takeSends(false);
      if (!sends.empty()) {
        withoutLock(remote, lock, [&] { RemoteChannel::awaitReceived(sends); });
      }
    }
    if (came && !failing()) {
      takeRemote(rank);
      progress(false);  // credits from the peer make room
    }
  } catch (const ConnectionLost& error) {
    noteLost(rank, error.what());
  } catch (const std::exception&) {
    failWith(std::current_exception());
  }
  remote.reading = false;
  leave(lock);
  return came;
}

void PointToPoint::takeRemote(int rank) {
  RemoteChannel& channel = *peers_[rank].remote.channel;
  const RecordHead head = channel.head();
  if (head.length > RemoteChannel::kPayloadBytes) {
    throwBroken(rank, " sends a record of ", head.length, " bytes");
  }
  const RecordBytes payload{{{channel.payload(), head.length}, {nullptr, 0}}};
  switch (head.kind) {
    case RecordHead::kMessage:
      takeMessage(rank, head, payload);
      break;
    case RecordHead::kCredit:
    case RecordHead::kClose:
      break;
    default:
      throwBroken(rank, " sends a record of an unknown kind");
  }
  channel.advance();
}

// --- threads -----------------------------------------------------------------------------------

/// If it is `needed`, starts a pooled thread that calls `serve` as long as it is. `served`: a
/// thread does, or is about to. False if no thread could be started: retry at the next turn.
template <typename Needed, typename Serve>
bool PointToPoint::startServing(bool& served, Needed needed, Serve serve) {
  if (!needed()) return true;
  served = startJob([this, &served, needed, serve] {
    Lock lock(*this);
    for (served = false; needed();) {
      serve(lock);
      if (lock.isSettled()) continue;
      lock.unlock();
      lock.lock();
    }
  });
  return served;
}

/// Starts pooled threads that read from peers of which a record is expected and that no thread
/// reads. Also calls serveBodies().
void PointToPoint::serveNetwork() {
  if (!anyElsewhere_) return;
  for (int rank = 0; rank < memory_.size(); ++rank) {
    Peer& peer = peers_[rank];
    const auto reads = [this, &peer] {
      return peer.place == Place::Elsewhere && peer.remote.mayRead() && !stopping_ && !failing() &&
             peer.expects(anyReceives_ > 0);
    };
    const auto serve = [this, rank](Lock& lock) {
      read(rank, Clock::now() + kSlice, lock);
      serveBodies();
    };
    if (!startServing(peer.remote.reading, reads, serve)) return;
  }
  serveBodies();
}

/// Starts pooled threads that wait for the bodies of operations without a waiter.
void PointToPoint::serveBodies() {
  for (const PointToPointRef& op : all_) {
    const auto waits = [this, op] {
      return op->body_ && !op->bodyAwaited_ && op->waiters_ == 0 && !stopping_ && !failing() &&
             !peers_[op->other()].remote.isLost();
    };
    const auto serve = [this, op](Lock& lock) { awaitBody(op, Clock::now() + kSlice, lock); };
    if (!startServing(op->bodyAwaited_, waits, serve)) return;
  }
}

// --- waiting -----------------------------------------------------------------------------------

/// Whether the operation's peer is on another host, or this rank has opened no shared memory.
bool PointToPoint::isElsewhere(const PointToPointOp& op) {
  if (!memory_.isOpen()) return true;
  if (!anyElsewhere_ || op.peer == kAnySource) return false;
  const Lock lock(*this);
  return peers_[op.peer].place == Place::Elsewhere;
}

/// See wait(). For peers of other hosts; nullopt if the peer is, or may be, on this host.
std::optional<bool> PointToPoint::waitElsewhere(const PointToPointRef& op, TimePoint until) {
  // Not counted in waiters_, which serve the peers of this host themselves.
  const ScopedCount<int> sleeps(sleepers_);
  const ScopedCount<int> waits(op->waiters_);
  TimePoint checked = Clock::now();
  Lock lock(*this);
  while (!op->done.load(std::memory_order_acquire)) {
    const bool here = op->peer == kAnySource || peers_[op->peer].place != Place::Elsewhere;
    if (memory_.isOpen() && here) return std::nullopt;  // met meanwhile; it rings the doorbell
    const auto now = Clock::now();
    if (now >= until) return false;
    const bool check = now - checked >= kSlice;
    if (check) checked = now;
    if (!progress(check)) waitOnNetwork(op, std::min<TimePoint>(until, now + kSlice), lock);
    lock.unlock();
    if (check) checkInterrupt();
    lock.lock();
  }
  return true;
}

/// Waits for what the operation needs: a record of the peer, its body, or another thread.
void PointToPoint::waitOnNetwork(const PointToPointRef& op, TimePoint until, Lock& lock) {
  const int rank = op->other();
  const bool connected = rank != kAnySource && peers_[rank].place == Place::Elsewhere &&
                         peers_[rank].remote.isConnected() && !op->ended_ && !stopping_ &&
                         !failing();
  if (connected && !op->body_ && peers_[rank].remote.mayRead()) {
    read(rank, until, lock);
    return;
  }
  serveNetwork();  // for other records that are expected
  if (connected && op->body_ && !op->bodyAwaited_) return awaitBody(op, until, lock);
  lock.wait(changed_, std::min<TimePoint>(until, nextTurn_));
}

}  // namespace fastcoll
