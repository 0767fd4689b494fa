// Point-to-point with ranks on other hosts: sends and receives over their channels. See
// remote_channel.hpp for the protocol.
//
// Threads wait on a channel without PointToPoint's lock, and count as its users. The network may
// use a message's memory while its body is in flight and the channel is open. So an operation that
// fails meanwhile completes only when the last user has left and the channel is closed.
#include <algorithm>

#include "base/entry_lock.hpp"
#include "base/interrupt.hpp"
#include "base/scoped_count.hpp"
#include "cpu/point_to_point/point_to_point.hpp"

namespace fastcoll {
namespace {

// How often a wait on the network checks whether the group has failed or is shut down.
constexpr Milliseconds kSlice{20};

std::uint8_t* inOnePiece(const Message& message) {
  std::uint8_t* const start = message.contiguous(0, message.bytes());
  if (start == nullptr)
    throw Error(ErrorKind::Backend,
                "internal error: expected a contiguous message. Please report this.");
  return start;
}

}  // namespace

// --- sending -----------------------------------------------------------------------------------

bool PointToPoint::advanceRemote(int rank, Finished& finished) {
  Peer& peer = peers_[rank];
  PeerConnection& remote = peer.remote;
  if (remote.isLost()) {
    noteLost(rank, remote.cause, finished);
    return false;
  }
  if (!remote.isConnected()) {
    needConnections();
    return false;
  }
  bool moved = false;
  try {
    while (!peer.sends.empty() && remote.channel->fits()) {
      const PointToPointRef op = peer.sends.front();
      sendRemote(peer, *op);
      moved = true;
      peer.sends.pop_front();
      if (!op->bodyUnderWay_) end(op, finished);
    }
  } catch (const ConnectionLost& error) {
    noteLost(rank, error.what(), finished);
  }
  return moved;
}

/// Writes the message's record, for which there is room. Starts the transfer of a separate body.
void PointToPoint::sendRemote(Peer& peer, PointToPointOp& op) {
  RemoteChannel& channel = *peer.remote.channel;
  const std::size_t bytes = op.message.bytes();
  RecordHead head{};
  head.kind = RecordHead::kMessage;
  head.tag = op.tag;
  head.dtype = op.dtype;
  head.bytes = bytes;
  head.asks = bytes > (channel.peerIsFull() ? kRecordBytesWhenFull : kRecordBytes);
  if (!head.asks) head.length = static_cast<std::uint32_t>(bytes);
  channel.write(head, op.message, 0);
  op.number_ = peer.sent++;
  op.begun_ = true;
  trace::start(op.trace);
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
void PointToPoint::awaitBody(const PointToPointRef& op, TimePoint until, Lock& lock,
                             Finished& finished) {
  const int rank = op->send ? op->peer : op->source;
  PeerConnection& remote = peers_[rank].remote;
  op->bodyAwaited_ = true;
  ++remote.users;
  lock.unlock();
  bool ended = false;
  std::string lost;
  try {
    ended = op->body_->wait(until);
  } catch (const ConnectionLost& error) {
    lost = error.what();
  }
  lock.lock();
  if (!lost.empty()) {
    // If the peer's close notice has arrived before, the peer has left and is not lost.
    while (remote.mayRead() && !memory_.aborted() && !stopping_) {
      if (!read(rank, Clock::now(), lock, finished)) break;
    }
    noteLost(rank, lost, finished);
  }
  op->bodyAwaited_ = false;
  --remote.users;
  if (ended && !memory_.aborted()) {
    op->body_.reset();
    op->bodyUnderWay_ = false;
    end(op, finished);
  }
  leave(finished);
}

/// Starts pooled threads that wait for the bodies of operations without a waiter.
void PointToPoint::callHelpers() {
  if (!anyElsewhere_) return;
  const auto unattended = [this](const PointToPointOp& op) {
    if (!op.body_ || op.bodyAwaited_ || op.waiters_ > 0 || stopping_ || memory_.aborted()) {
      return false;
    }
    return !peers_[op.send ? op.peer : op.source].remote.isLost();
  };
  for (const PointToPointRef& op : all_) {
    if (!unattended(*op)) continue;
    try {
      startJob([this, op, unattended] {
        Lock lock(mutex_);
        op->bodyAwaited_ = false;
        while (unattended(*op)) {
          Finished finished;
          awaitBody(op, Clock::now() + kSlice, lock, finished);
          if (finished.empty()) continue;
          lock.unlock();
          complete(finished);
          lock.lock();
        }
      });
    } catch (const std::exception&) {  // no thread: retry at the next look
      return;
    }
    op->bodyAwaited_ = true;
  }
}

// --- receiving ---------------------------------------------------------------------------------

/// Waits for the peer's next record without the lock, and takes what has arrived. False if none
/// has.
bool PointToPoint::read(int rank, TimePoint until, Lock& lock, Finished& finished) {
  PeerConnection& remote = peers_[rank].remote;
  RemoteChannel& channel = *remote.channel;
  remote.reading = true;
  ++remote.users;
  lock.unlock();
  bool came = false;
  std::string lost;
  try {
    came = channel.wait(until);
  } catch (const ConnectionLost& error) {
    lost = error.what();
  }
  lock.lock();
  remote.reading = false;
  if (!lost.empty()) noteLost(rank, lost, finished);
  if (came && !memory_.aborted()) {
    try {
      takeRemote(rank, finished);
      progress(finished, false);  // credits from the peer make room
    } catch (const ConnectionLost& error) {
      noteLost(rank, error.what(), finished);
    } catch (const std::exception& error) {
      failWith(error, finished);
    }
  }
  --remote.users;
  leave(finished);
  return came;
}

void PointToPoint::takeRemote(int rank, Finished& finished) {
  RemoteChannel& channel = *peers_[rank].remote.channel;
  const RecordHead head = channel.head();
  if (head.length > RemoteChannel::kPayloadBytes) {
    throw Error(ErrorKind::Backend, "internal error: ", memory_.memberName(rank),
                " sends a record of ", head.length, " bytes", kReportThis);
  }
  const RecordBytes payload{{{channel.payload(), head.length}, {nullptr, 0}}};
  switch (head.kind) {
    case RecordHead::kMessage:
      takeMessage(rank, head, payload, finished);
      break;
    case RecordHead::kTaken:
    case RecordHead::kGoodbye:
      break;
    default:
      throw Error(ErrorKind::Backend, "internal error: ", memory_.memberName(rank),
                  " sends a record of an unknown kind", kReportThis);
  }
  channel.advance();
}

/// Starts pooled threads that read from peers of which a record is expected and that no thread
/// reads.
void PointToPoint::callReaders() {
  if (!anyElsewhere_ || stopping_ || memory_.aborted()) return;
  for (int rank = 0; rank < memory_.size(); ++rank) {
    Peer& peer = peers_[rank];
    const auto wanted = [this, &peer] {
      return peer.place == Place::Elsewhere && peer.remote.mayRead() && !stopping_ &&
             !memory_.aborted() && peer.expects(anyReceives_ > 0);
    };
    if (!wanted()) continue;
    try {
      startJob([this, rank, &peer, wanted] {
        Lock lock(mutex_);
        peer.remote.reading = false;
        while (wanted()) {
          Finished finished;
          read(rank, Clock::now() + kSlice, lock, finished);
          callHelpers();
          if (finished.empty()) continue;
          lock.unlock();
          complete(finished);
          lock.lock();
        }
      });
    } catch (const std::exception&) {  // no thread: retry at the next look
      return;
    }
    peer.remote.reading = true;  // by the thread that starts
  }
}

// --- waiting -----------------------------------------------------------------------------------

/// Whether the operation's peer is on another host, or this rank has opened no shared memory.
bool PointToPoint::isElsewhere(const PointToPointOp& op) {
  if (!memory_.isOpen()) return true;
  if (!anyElsewhere_ || op.peer == kAnySource) return false;
  const Lock lock = lockAfterWait(mutex_);
  return peers_[op.peer].place == Place::Elsewhere;
}

/// See wait(). For peers of other hosts; nullopt if the peer is, or may be, on this host.
std::optional<bool> PointToPoint::waitElsewhere(const PointToPointRef& op, TimePoint until) {
  // Not counted in waiters_, which serve the peers of this host themselves.
  const ScopedCount<int> sleeps(sleepers_);
  const ScopedCount<int> waits(op->waiters_);
  TimePoint looked = Clock::now();
  Lock lock(mutex_);
  while (!op->done.load(std::memory_order_acquire)) {
    const bool here = op->peer == kAnySource || peers_[op->peer].place != Place::Elsewhere;
    if (memory_.isOpen() && here) return std::nullopt;  // met meanwhile; it rings the doorbell
    const auto now = Clock::now();
    if (now >= until) return false;
    const bool look = now - looked >= kSlice;
    if (look) looked = now;
    Finished finished;
    const bool moved = progress(finished, look);
    if (finished.empty() && !moved) {
      waitOnNetwork(op, std::min<TimePoint>(until, now + kSlice), lock, finished);
    }
    lock.unlock();
    complete(finished);
    if (look) checkInterrupt();
    lock.lock();
  }
  return true;
}

/// Waits for what the operation needs: a record of the peer, its body, or another thread.
void PointToPoint::waitOnNetwork(const PointToPointRef& op, TimePoint until, Lock& lock,
                                 Finished& finished) {
  const int rank = op->send ? op->peer : std::max(op->source, op->peer);
  Peer* const peer = rank == kAnySource ? nullptr : &peers_[rank];
  if (peer != nullptr && peer->place == Place::Elsewhere && peer->remote.isConnected() &&
      !op->ended_ && !stopping_ && !memory_.aborted()) {
    if (!op->body_) {
      if (peer->remote.mayRead()) {
        read(rank, until, lock, finished);
        return;
      }
    } else if (!op->bodyAwaited_) {
      callReaders();  // for other records that are expected
      return awaitBody(op, until, lock, finished);
    }
  }
  callReaders();
  changed_.wait_until(lock, std::min<TimePoint>(until, lookAt_));
}

}  // namespace fastcoll
