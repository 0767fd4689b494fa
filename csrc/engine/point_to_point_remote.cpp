// Point-to-point with ranks on other hosts: what is sent and taken through their channels. See
// remote_channel.hpp for the protocol.
//
// The channel's waits run without the engine's lock, by threads that count as its users. Memory of
// a message may be written as long as its rest is under way and the channel is open: so an
// operation that fails meanwhile is told so only when the last user has left and the channel is
// closed.
#include <algorithm>
#include <utility>

#include "../base/counted.hpp"
#include "../base/interrupt.hpp"
#include "point_to_point.hpp"
#include "worker_pool.hpp"

namespace fastcoll {
namespace {

// A wait on the network looks so often whether it is to end: the group failed, or is shut down.
constexpr Milliseconds kSlice{20};
// For a peer's goodbye, which says that it has all that was sent to it.
constexpr Milliseconds kGoodbye{200};
// For a slow link to take what the kernel still holds.
constexpr Milliseconds kDrain{2000};

}  // namespace

// --- sending -----------------------------------------------------------------------------------

bool PointToPoint::advanceRemote(int rank, Finished& finished) {
  Peer& peer = peers_[static_cast<std::size_t>(rank)];
  if (!peer.lost.empty()) {
    noteLost(rank, peer.lost, finished);
    return false;
  }
  if (!peer.channel) {
    needConnections();
    return false;
  }
  bool moved = false;
  try {
    while (!peer.sends.empty() && peer.channel->fits()) {
      const PointToPointRef op = peer.sends.front();
      if (!op->begun_) {
        beginRemote(peer, *op);
        if (op->unasked_ < op->message.bytes()) sendRest(op);
      } else {
        RecordHead head{};
        head.kind = PairRecord::kPiece;
        head.where = op->number_;
        const std::size_t take = std::min(op->unasked_ - op->moved_, RemoteChannel::kPayloadBytes);
        head.length = static_cast<std::uint32_t>(take);
        peer.channel->write(head, op->message, op->moved_);
        op->moved_ += take;
      }
      moved = true;
      if (op->moved_ < op->unasked_) continue;
      peer.sends.pop_front();
      if (!op->restUnderWay_) end(op, finished);
    }
  } catch (const ConnectionLost& error) {
    noteLost(rank, error.what(), finished);
  }
  return moved;
}

/// Writes a message's first record, for which there is room.
void PointToPoint::beginRemote(Peer& peer, PointToPointOp& op) {
  const std::size_t bytes = op.message.bytes();
  RecordHead head{};
  head.kind = PairRecord::kMessage;
  head.tag = op.tag;
  head.dtype = op.dtype;
  head.bytes = bytes;
  const bool whole =
      bytes <= (peer.channel->peerIsFull() ? RemoteChannel::kPayloadBytes / 16 : kRecordsBytes);
  if (whole) {
    op.unasked_ = bytes;
    head.length = static_cast<std::uint32_t>(std::min(bytes, RemoteChannel::kPayloadBytes));
  } else {
    // The head goes alone, so that the receiver asks for the rest while the beginning is under way.
    op.unasked_ = peer.channel->peerIsFull() ? 0 : kRemoteEagerBytes;
    head.asks = true;
    head.where = op.unasked_;
  }
  peer.channel->write(head, op.message, 0);
  op.number_ = peer.sent++;
  op.moved_ = head.length;
  op.begun_ = true;
  trace::start(op.trace);
}

void PointToPoint::sendRest(const PointToPointRef& op) {
  const std::size_t rest = op->message.bytes() - op->unasked_;
  const std::uint8_t* const from = op->message.contiguous(op->unasked_, rest);
  if (from == nullptr) throw Error(ErrorKind::Backend, "a message to another host lies in pieces");
  RemoteChannel& channel = *peers_[static_cast<std::size_t>(op->peer)].channel;
  awaitRest(op->peer, op, channel.sendRest(op->number_, from, rest));
}

void PointToPoint::receiveRest(const PointToPointRef& op) {
  const std::size_t rest = op->message.bytes() - op->unasked_;
  std::uint8_t* const into = op->message.contiguous(op->unasked_, rest);
  if (into == nullptr) throw Error(ErrorKind::Backend, "a message to another host lies in pieces");
  RemoteChannel& channel = *peers_[static_cast<std::size_t>(op->source)].channel;
  awaitRest(op->source, op, channel.receiveRest(op->number_, into, rest));
}

/// Has a pooled thread wait for the transfer, and end the operation with it.
void PointToPoint::awaitRest(int rank, const PointToPointRef& op, TransferRef transfer) {
  Peer& peer = peers_[static_cast<std::size_t>(rank)];
  startJob([this, rank, op, &peer, transfer = std::make_shared<TransferRef>(std::move(transfer))] {
    bool ended = false;
    std::string lost;
    for (;;) {
      try {
        ended = (*transfer)->wait(Clock::now() + kSlice);
      } catch (const ConnectionLost& error) {
        lost = error.what();
      }
      if (ended || !lost.empty()) break;
      const std::lock_guard<std::mutex> lock(mutex_);
      if (stopping_ || memory_.aborted()) break;
    }
    transfer->reset();
    Finished finished;
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      --peer.users;
      if (!lost.empty()) noteLost(rank, lost, finished);
      if (ended && !memory_.aborted()) {
        op->restUnderWay_ = false;
        if (op->moved_ == op->unasked_) end(op, finished);
      }
      leave(finished);
    }
    complete(finished);
  });
  op->restUnderWay_ = true;
  ++peer.users;
}

// --- receiving ---------------------------------------------------------------------------------

/// Waits for the peer's next record without the lock, and takes what has come.
void PointToPoint::read(int rank, TimePoint until, Lock& lock, Finished& finished) {
  Peer& peer = peers_[static_cast<std::size_t>(rank)];
  RemoteChannel& channel = *peer.channel;
  peer.reading = true;
  ++peer.users;
  lock.unlock();
  bool came = false;
  std::string lost;
  try {
    came = channel.wait(until);
  } catch (const ConnectionLost& error) {
    lost = error.what();
  }
  lock.lock();
  peer.reading = false;
  if (!lost.empty()) noteLost(rank, lost, finished);
  if (came && !memory_.aborted()) {
    try {
      takeRemote(rank, finished);
      progress(finished, false);  // what the peer has taken makes room
    } catch (const ConnectionLost& error) {
      noteLost(rank, error.what(), finished);
    } catch (const std::exception& error) {
      failWith(error, finished);
    }
  }
  --peer.users;
  leave(finished);
}

void PointToPoint::takeRemote(int rank, Finished& finished) {
  RemoteChannel& channel = *peers_[static_cast<std::size_t>(rank)].channel;
  const RecordHead head = channel.head();
  if (head.length > RemoteChannel::kPayloadBytes) {
    throw Error(ErrorKind::Backend,
                concat(memory_.memberName(rank), " sends a record of ", head.length, " bytes"));
  }
  const RecordBytes payload{{{channel.payload(), head.length}, {nullptr, 0}}};
  switch (head.kind) {
    case PairRecord::kMessage:
      takeMessage(rank, head, payload, finished);
      break;
    case PairRecord::kPiece:
      takePiece(rank, head, payload, finished);
      break;
    case PairRecord::kTaken:
    case PairRecord::kGoodbye:
      break;
    default:
      throw Error(ErrorKind::Backend,
                  concat(memory_.memberName(rank), " sends a record of no known kind"));
  }
  channel.advance();
}

/// Has pooled threads read from the peers of which something is expected and that nobody reads
/// from.
void PointToPoint::callReaders() {
  if (!anyElsewhere_ || stopping_ || memory_.aborted()) return;
  for (int rank = 0; rank < memory_.size(); ++rank) {
    Peer& peer = peers_[static_cast<std::size_t>(rank)];
    const auto wanted = [this, &peer] {
      return peer.elsewhere && peer.channel && !peer.reading && peer.lost.empty() && !stopping_ &&
             !memory_.aborted() && !peer.channel->heardGoodbye() && peer.expects(anyReceives_ > 0);
    };
    if (!wanted()) continue;
    startJob([this, rank, &peer, wanted] {
      Lock lock(mutex_);
      peer.reading = false;
      while (wanted()) {
        Finished finished;
        read(rank, Clock::now() + kSlice, lock, finished);
        if (finished.empty()) continue;
        lock.unlock();
        complete(finished);
        lock.lock();
      }
    });
    peer.reading = true;  // by the thread that is about to
  }
}

// --- waiting -----------------------------------------------------------------------------------

/// The operation's peer is on another host, or no host's memory is open here.
bool PointToPoint::isElsewhere(const PointToPointOp& op) {
  if (!memory_.isOpen()) return true;
  if (!anyElsewhere_ || op.peer == kAnySource) return false;
  const std::lock_guard<std::mutex> lock(mutex_);
  return peers_[static_cast<std::size_t>(op.peer)].elsewhere;
}

bool PointToPoint::waitElsewhere(const PointToPointOp& op, TimePoint until) {
  // Not one of waiters_, which see to the peers of this host themselves.
  const Counted<int> sleeps(sleepers_);
  TimePoint looked = Clock::now();
  Lock lock(mutex_);
  while (!op.done.load(std::memory_order_acquire)) {
    const bool here = op.peer != kAnySource && !peers_[static_cast<std::size_t>(op.peer)].elsewhere;
    if (memory_.isOpen() && (here || op.peer == kAnySource)) {
      lock.unlock();
      return wait(op, until);  // it was met meanwhile, and rings the bell
    }
    const auto now = Clock::now();
    if (now >= until) return false;
    const bool look = now - looked >= kSlice;
    if (look) looked = now;
    Finished finished;
    const bool moved = progress(finished, look);
    if (finished.empty() && !moved) {
      const TimePoint next = std::min<TimePoint>(until, now + kSlice);
      Peer* const peer =
          op.peer == kAnySource ? nullptr : &peers_[static_cast<std::size_t>(op.peer)];
      const bool reads = peer != nullptr && peer->channel && !peer->reading && peer->lost.empty() &&
                         !peer->channel->heardGoodbye() && !op.restUnderWay_ && !op.ended_ &&
                         !memory_.aborted();
      if (reads) {
        read(op.peer, next, lock, finished);
      } else {
        callReaders();
        changed_.wait_until(lock, std::min<TimePoint>(next, lookAt_));
      }
    }
    lock.unlock();
    complete(finished);
    if (look) checkInterrupt();
    lock.lock();
  }
  return true;
}

// --- the end -----------------------------------------------------------------------------------

/// The connection to the peer is gone, which is a fault if something is expected of the peer.
void PointToPoint::noteLost(int rank, const std::string& text, Finished& finished) {
  Peer& peer = peers_[static_cast<std::size_t>(rank)];
  if (peer.lost.empty()) peer.lost = text.empty() ? "it broke" : text;
  const bool said = peer.channel && peer.channel->heardGoodbye();
  const auto concerns = [rank](const PointToPointRef& op) {
    return op->peer == rank || op->source == rank || (op->peer == kAnySource && op->source < 0);
  };
  if (said || peer.explaining || stopping_ || memory_.aborted() ||
      std::none_of(all_.begin(), all_.end(), concerns)) {
    return;
  }
  try {
    startJob([this, rank, why = peer.lost] {
      const ToldFault fault = setup_.whyLost(rank, why);
      Finished failed;
      {
        const std::lock_guard<std::mutex> lock(mutex_);
        fail(fault.kind, fault.text, failed);
      }
      complete(failed);
    });
    peer.explaining = true;
  } catch (const std::exception&) {  // no thread is to be had
    fail(ErrorKind::Backend, concat(memory_.memberName(rank), ": ", peer.lost), finished);
  }
}

/// Of a thread that has used a channel without the lock: ends what waited for that.
void PointToPoint::leave(Finished& finished) {
  if (memory_.aborted()) {
    failAllLocked(finished);
  } else if (stopping_) {
    closeUnused();
  }
  changed_.notify_all();
}

/// Closes the channels that no thread uses.
void PointToPoint::closeUnused() {
  for (Peer& peer : peers_) {
    if (peer.users == 0) peer.channel.reset();
  }
}

/// Says goodbye to the peers on other hosts, and waits for theirs: a connection that is closed may
/// take with it what a peer has not read yet.
void PointToPoint::flushRemote(TimePoint until) {
  const Counted<int> sleeps(sleepers_);
  Finished finished;
  {
    Lock lock(mutex_);
    if (memory_.aborted() || active()) return;
    until = std::min<TimePoint>(until, Clock::now() + kGoodbye);
    const auto each = [this](auto use) {
      for (int rank = 0; rank < memory_.size(); ++rank) {
        Peer& peer = peers_[static_cast<std::size_t>(rank)];
        if (!peer.channel || !peer.lost.empty()) continue;
        try {
          use(rank, peer);
        } catch (const ConnectionLost& error) {
          peer.lost = error.what();
        }
      }
    };
    bool connected = false;
    each([&connected](int, Peer& peer) {
      connected = true;
      peer.channel->sayGoodbye();
    });
    if (!connected) return;
    each([until](int, Peer& peer) { peer.channel->flush(until); });
    lock.unlock();
    setup_.network()->drain(Clock::now() + kDrain);
    lock.lock();
    each([&](int rank, Peer& peer) {
      // A fault closes the channel.
      while (peer.channel && !memory_.aborted() && peer.lost.empty() &&
             !peer.channel->heardGoodbye() && Clock::now() < until) {
        const auto next = std::min<TimePoint>(until, Clock::now() + kSlice);
        if (peer.reading) {
          changed_.wait_until(lock, next);
        } else {
          read(rank, next, lock, finished);
        }
      }
    });
  }
  complete(finished);
}

}  // namespace fastcoll
