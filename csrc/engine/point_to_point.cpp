#include "point_to_point.hpp"

#include <pthread.h>

#include <algorithm>
#include <cstring>
#include <thread>
#include <utility>

#include "../base/interrupt.hpp"
#include "../base/thread.hpp"
#include "../base/topology.hpp"

namespace fastcoll {
namespace {
constexpr Milliseconds kComeBack{1000};
}  // namespace

PointToPoint::PointToPoint(GroupMemory& memory, Rendezvous& rendezvous, int spinMicros)
    : memory_(memory),
      rendezvous_(rendezvous),
      spinMicros_(spinMicros),
      peers_(static_cast<std::size_t>(memory.size())) {}

PointToPoint::~PointToPoint() {
  stop();
}

void PointToPoint::stop() {
  {
    std::lock_guard<std::mutex> lock(mutex_);
    stopping_ = true;
    background_.notify_all();
  }
  if (thread_.joinable()) thread_.join();
}

std::string PointToPoint::describe(const PointToPointOp& op) const {
  const std::string peer = op.peer == kAnySource ? "any rank" : memory_.memberName(op.peer);
  return concat(op.send ? "send" : "recv", "(seq ", op.seq, ", ", dtypeName(op.dtype), "[",
                op.message.bytes() / elementSize(op.dtype), "], ", op.send ? "to " : "from ", peer,
                ", tag ", op.tag, ")");
}

void PointToPoint::submit(PointToPointRef op) {
  Finished finished;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    ++pending_;
    all_.push_back(op);
    if (op->send) {
      peers_[static_cast<std::size_t>(op->peer)].sends.push_back(op);
    } else if (!matchUnexpected(op, finished)) {
      receives_.push_back(op);
    }
    progress(finished);
    if (active() && !threadRuns_ && !stopping_) {
      if (thread_.joinable()) thread_.join();
      thread_ = startThread([this] { serveInBackground(); });
      threadRuns_ = true;
    }
  }
  complete(finished);
}

void PointToPoint::poll() {
  Finished finished;
  if (std::unique_lock<std::mutex> lock(mutex_, std::try_to_lock); lock.owns_lock()) {
    progress(finished);
    lock.unlock();
  }
  complete(finished);
}

bool PointToPoint::wait(const PointToPointOp& op, TimePoint until) {
  struct Counted {
    std::atomic<int>& count;
    explicit Counted(std::atomic<int>& c) : count(c) { ++count; }
    ~Counted() { --count; }
  } counted(waiters_);
  auto spinEnd = Clock::now() + std::chrono::microseconds(spinMicros_);
  while (!op.done.load(std::memory_order_acquire)) {
    auto& bell = memory_.own().doorbell;
    const std::uint64_t rings = bell.rings.load(std::memory_order_seq_cst);
    Finished finished;
    // Whoever holds the lock may have looked before the bell was last rung, and may not look again.
    bool lookSoon = true;
    if (std::unique_lock<std::mutex> lock(mutex_, std::try_to_lock); lock.owns_lock()) {
      progress(finished);
      lookSoon = unpaired_;
      lock.unlock();
    }
    const bool moved = !finished.empty();
    complete(finished);
    if (op.done.load(std::memory_order_acquire)) return true;
    if (moved || bell.rings.load(std::memory_order_acquire) != rings) {
      spinEnd = Clock::now() + std::chrono::microseconds(spinMicros_);
      continue;
    }
    const auto now = Clock::now();
    if (now >= until) return false;
    if (now < spinEnd) {
      for (int i = 0; i < 32; ++i) cpuRelax();
      continue;
    }
    checkInterrupt();
    const auto slice = std::min<std::chrono::nanoseconds>(
        lookSoon ? std::chrono::nanoseconds(200000) : std::chrono::nanoseconds(kWaitSlice),
        until - now);
    bell.waiters.fetch_add(1, std::memory_order_seq_cst);
    if (bell.rings.load(std::memory_order_seq_cst) == rings) {
      futexWait(lowHalf(&bell.rings), static_cast<std::uint32_t>(rings), slice);
    }
    bell.waiters.fetch_sub(1, std::memory_order_relaxed);
  }
  return true;
}

// The background thread keeps out of the way while somebody waits (a waiter makes progress itself)
// and goes when nothing is under way for a while.
void PointToPoint::serveInBackground() {
  ::pthread_setname_np(::pthread_self(), "fastcoll-p2p");
  auto idleSince = Clock::now();
  std::this_thread::sleep_for(std::chrono::microseconds(100));
  for (;;) {
    Finished finished;
    std::uint64_t rings = 0;
    bool sleepOnBell = false;
    {
      std::unique_lock<std::mutex> lock(mutex_);
      if (stopping_) break;
      if (active()) {
        idleSince = Clock::now();
      } else if (Clock::now() - idleSince > Milliseconds(100)) {
        threadRuns_ = false;
        return;
      }
      if (active() && waiters_.load() == 0) {
        rings = memory_.own().doorbell.rings.load(std::memory_order_seq_cst);
        progress(finished);
        sleepOnBell = finished.empty() && !unpaired_;
      }
      if (finished.empty() && !sleepOnBell) background_.wait_for(lock, Milliseconds(1));
    }
    complete(finished);
    if (sleepOnBell) {
      auto& bell = memory_.own().doorbell;
      bell.waiters.fetch_add(1, std::memory_order_seq_cst);
      if (bell.rings.load(std::memory_order_seq_cst) == rings) {
        futexWait(lowHalf(&bell.rings), static_cast<std::uint32_t>(rings), Milliseconds(5));
      }
      bell.waiters.fetch_sub(1, std::memory_order_relaxed);
    }
  }
  std::lock_guard<std::mutex> lock(mutex_);
  threadRuns_ = false;
}

void PointToPoint::complete(Finished& finished) {
  if (finished.empty()) return;
  for (auto& [op, fault] : finished) {
    op->complete(fault);
    op->done.store(true, std::memory_order_release);
  }
  // Other threads of this process may sleep on the bell for what was finished here.
  ring(memory_.rank());
}

void PointToPoint::ring(int rank) {
  const bool self = rank == memory_.rank();
  // A peer may have found this rank before this rank has found the peer: it looks by itself then.
  if (!self && !memory_.isBound(rank)) return;
  Doorbell& bell = (self ? memory_.own() : memory_.block(rank)).doorbell;
  bell.rings.fetch_add(1, std::memory_order_seq_cst);
  if (bell.waiters.load(std::memory_order_seq_cst) != 0) futexWakeAll(lowHalf(&bell.rings));
}

void PointToPoint::failAll() {
  Finished finished;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    failAllLocked(finished);
  }
  complete(finished);
}

void PointToPoint::failAllLocked(Finished& finished) {
  const auto& id = memory_.identity();
  for (const auto& op : all_) {
    try {
      memory_.throwAborted(concat("fastcoll.", op->send ? "send" : "recv", " [group '", id.name,
                                  "', rank ", id.rank, "/", id.size, ", seq ", op->seq, "]: "));
    } catch (...) {
      finished.emplace_back(op, std::current_exception());
    }
  }
  all_.clear();
  receives_.clear();
  unexpected_.clear();
  pending_ = 0;
  for (Peer& peer : peers_) {
    peer.sends.clear();
    peer.streaming.reset();
    peer.granted.clear();
  }
}

void PointToPoint::finish(const PointToPointRef& op, Finished& finished) {
  // After a fault elsewhere the channel just read may already have been given back.
  if (!op->send && memory_.aborted()) memory_.throwAborted("");
  finished.emplace_back(op, nullptr);
  --pending_;
  all_.erase(std::find(all_.begin(), all_.end(), op));
}

void PointToPoint::progress(Finished& finished) {
  if (!active()) return;
  if (memory_.aborted()) return failAllLocked(finished);
  unpaired_ = false;
  try {
    const bool anySource =
        std::any_of(receives_.begin(), receives_.end(),
                    [](const PointToPointRef& op) { return op->peer == kAnySource; });
    std::vector<bool> wanted(peers_.size(), anySource);
    for (const auto& op : receives_) {
      if (op->peer != kAnySource) wanted[static_cast<std::size_t>(op->peer)] = true;
    }
    for (int rank = 0; rank < memory_.size(); ++rank) {
      const Peer& peer = peers_[static_cast<std::size_t>(rank)];
      const bool busy = !peer.sends.empty() || peer.streaming != nullptr || !peer.granted.empty() ||
                        wanted[static_cast<std::size_t>(rank)];
      if (busy && rank != memory_.rank()) advancePeer(rank, finished);
    }
    checkFaults(finished);
  } catch (const Error& error) {
    memory_.abort(error.kind(), error.what());
    failAllLocked(finished);
  } catch (const std::exception& error) {
    memory_.abort(ErrorKind::Backend, concat("rank ", memory_.rank(), ": ", error.what()));
    failAllLocked(finished);
  }
}

void PointToPoint::advancePeer(int rank, Finished& finished) {
  Peer& peer = peers_[static_cast<std::size_t>(rank)];
  if (!peer.paired) tryPair(rank);
  advanceSends(rank, finished);  // needs no pairing: the channel is this rank's own memory
  if (peer.paired && peer.in == nullptr) {
    const std::uint64_t offset =
        memory_.block(rank).link(memory_.rank()).channel.load(std::memory_order_acquire);
    if (offset != 0) {
      peer.in = reinterpret_cast<PairChannel*>(memory_.inPeer(rank, offset, sizeof(PairChannel)));
    }
  }
  if (peer.in != nullptr) {
    takeDescriptors(rank, finished);
    drain(rank, finished);
  }
}

void PointToPoint::tryPair(int rank) {
  Peer& peer = peers_[static_cast<std::size_t>(rank)];
  const auto now = Clock::now();
  if (now >= peer.nextTry) {
    peer.paired = rendezvous_.tryPair(rank);
    const int micros = std::min(10000, 100 << std::min(peer.tries++, 7));
    peer.nextTry = now + std::chrono::microseconds(micros);
    if (peer.paired) ring(rank);  // it may wait for what was posted before it could be rung
  }
  if (!peer.paired) unpaired_ = true;
}

void PointToPoint::advanceSends(int rank, Finished& finished) {
  Peer& peer = peers_[static_cast<std::size_t>(rank)];
  if (peer.out == nullptr) {
    if (peer.sends.empty() || !memory_.isOpen()) return;
    const std::uint64_t offset = memory_.arena().allocate(sizeof(PairChannel));
    peer.out = reinterpret_cast<PairChannel*>(memory_.arena().base() + offset);
    memory_.own().link(rank).channel.store(offset, std::memory_order_release);
  }
  PairChannel& channel = *peer.out;
  bool posted = false;
  for (std::size_t i = 0; i < peer.sends.size();) {
    const PointToPointRef op = peer.sends[i];
    if (op->posted_) {
      ++i;
      continue;
    }
    const std::uint64_t number = channel.posted.load(std::memory_order_relaxed);
    if (number - channel.taken.load(std::memory_order_acquire) >= PairChannel::kDescriptors) break;
    auto& descriptor = channel.descriptors[number % PairChannel::kDescriptors];
    const std::size_t bytes = op->message.bytes();
    descriptor.bytes = bytes;
    descriptor.tag = op->tag;
    descriptor.dtype = op->dtype;
    const bool rides = bytes <= PairChannel::kInlineBytes;
    if (rides) op->message.read(0, bytes, descriptor.payload);
    channel.posted.store(number + 1, std::memory_order_seq_cst);
    posted = true;
    op->number_ = number;
    op->posted_ = true;
    if (rides) {
      peer.sends.erase(peer.sends.begin() + static_cast<std::ptrdiff_t>(i));
      finish(op, finished);
    } else {
      ++i;
    }
  }
  if (posted) ring(rank);
  stream(rank, finished);
}

void PointToPoint::stream(int rank, Finished& finished) {
  Peer& peer = peers_[static_cast<std::size_t>(rank)];
  PairChannel& channel = *peer.out;
  for (;;) {
    if (peer.streaming == nullptr) {
      const std::uint64_t wanted = channel.granted.load(std::memory_order_acquire);
      const auto found = std::find_if(
          peer.sends.begin(), peer.sends.end(),
          [&](const PointToPointRef& op) { return op->posted_ && op->number_ + 1 == wanted; });
      if (found == peer.sends.end()) break;
      peer.streaming = *found;
      peer.sends.erase(found);
    }
    PointToPointOp& op = *peer.streaming;
    const std::size_t total = op.message.bytes();
    std::uint64_t slot = channel.streamed.load(std::memory_order_relaxed);
    while (op.moved_ < total &&
           slot - channel.drained.load(std::memory_order_acquire) < PairChannel::kDataSlots) {
      const std::size_t take = std::min(PairChannel::kDataBytes, total - op.moved_);
      op.message.read(op.moved_, take, channel.data[slot % PairChannel::kDataSlots]);
      op.moved_ += take;
      channel.streamed.store(++slot, std::memory_order_seq_cst);
      ring(rank);
    }
    if (op.moved_ < total) break;
    finish(std::exchange(peer.streaming, nullptr), finished);
  }
}

void PointToPoint::takeDescriptors(int rank, Finished& finished) {
  PairChannel& channel = *peers_[static_cast<std::size_t>(rank)].in;
  const std::uint64_t posted = channel.posted.load(std::memory_order_acquire);
  std::uint64_t number = channel.taken.load(std::memory_order_relaxed);
  if (posted == number) return;
  if (posted - number > PairChannel::kDescriptors) {
    throw Error(ErrorKind::Backend, concat(memory_.memberName(rank), " posted ", posted - number,
                                           " messages where ", PairChannel::kDescriptors, " fit"));
  }
  for (; number < posted; ++number) {
    const auto& descriptor = channel.descriptors[number % PairChannel::kDescriptors];
    Unexpected message{rank, number, descriptor.tag, descriptor.dtype, descriptor.bytes, {}};
    if (message.bytes <= PairChannel::kInlineBytes) {
      message.payload.assign(descriptor.payload, descriptor.payload + message.bytes);
    }
    const auto match =
        std::find_if(receives_.begin(), receives_.end(), [&](const PointToPointRef& op) {
          return (op->peer == rank || op->peer == kAnySource) && op->tag == message.tag;
        });
    if (match == receives_.end()) {
      unexpected_.push_back(std::move(message));
    } else {
      const PointToPointRef op = *match;
      receives_.erase(match);
      deliver(op, std::move(message), finished);
    }
  }
  channel.taken.store(number, std::memory_order_seq_cst);
  ring(rank);
}

bool PointToPoint::matchUnexpected(const PointToPointRef& op, Finished& finished) {
  const auto match =
      std::find_if(unexpected_.begin(), unexpected_.end(), [&](const Unexpected& message) {
        return (op->peer == message.source || op->peer == kAnySource) && op->tag == message.tag;
      });
  if (match == unexpected_.end()) return false;
  Unexpected message = std::move(*match);
  unexpected_.erase(match);
  try {
    deliver(op, std::move(message), finished);
  } catch (const Error& error) {
    memory_.abort(error.kind(), error.what());
    failAllLocked(finished);
  }
  return true;
}

void PointToPoint::deliver(const PointToPointRef& op, Unexpected&& message, Finished& finished) {
  op->source = message.source;
  if (message.bytes != op->message.bytes() || message.dtype != op->dtype) {
    throw Error(ErrorKind::Backend,
                concat("Detected mismatch: rank ", memory_.rank(), " runs ", describe(*op), ", ",
                       memory_.memberName(message.source), " sends ", dtypeName(message.dtype), "[",
                       message.bytes / elementSize(message.dtype), "] with tag ", message.tag,
                       ". Give both ends the same dtype and number of elements."));
  }
  if (message.bytes <= PairChannel::kInlineBytes) {
    op->message.write(0, message.bytes, message.payload.data());
    finish(op, finished);
    return;
  }
  peers_[static_cast<std::size_t>(message.source)].granted.emplace_back(message.number, op);
}

void PointToPoint::drain(int rank, Finished& finished) {
  Peer& peer = peers_[static_cast<std::size_t>(rank)];
  PairChannel& channel = *peer.in;
  while (!peer.granted.empty()) {
    const auto [number, op] = peer.granted.front();
    if (channel.granted.load(std::memory_order_relaxed) != number + 1) {
      channel.granted.store(number + 1, std::memory_order_seq_cst);
      ring(rank);
    }
    const std::size_t total = op->message.bytes();
    const std::uint64_t streamed = channel.streamed.load(std::memory_order_acquire);
    std::uint64_t slot = channel.drained.load(std::memory_order_relaxed);
    bool moved = false;
    for (; slot < streamed && op->moved_ < total; ++slot, moved = true) {
      const std::size_t take = std::min(PairChannel::kDataBytes, total - op->moved_);
      op->message.write(op->moved_, take, channel.data[slot % PairChannel::kDataSlots]);
      op->moved_ += take;
    }
    if (moved) {
      channel.drained.store(slot, std::memory_order_seq_cst);
      ring(rank);
    }
    if (op->moved_ < total) return;
    peer.granted.pop_front();
    finish(op, finished);
  }
}

// A peer that died, or left without giving what is asked of it, and operations whose time is up.
void PointToPoint::checkFaults(Finished& finished) {
  const auto now = Clock::now();
  for (std::size_t i = 0; i < all_.size(); ++i) {
    const PointToPointRef op = all_[i];
    std::string cause = causeOfSilence(*op, now);
    if (!cause.empty() && op->peer != kAnySource) {
      // What it wrote before it went counts.
      advancePeer(op->peer, finished);
      if (i >= all_.size() || all_[i] != op)
        return;  // it was there; the rest is for the next round
    }
    ErrorKind kind = ErrorKind::Backend;
    if (cause.empty() && now >= op->deadline) {
      kind = ErrorKind::Timeout;
      std::string state;
      if (op->peer != kAnySource && memory_.isBound(op->peer)) {
        const auto pid = static_cast<int>(memory_.process(op->peer).header().pid);
        state = concat(" (state ", processState(pid), ")");
      } else if (op->peer != kAnySource) {
        state = ", which has not used the group for point-to-point with this rank";
      }
      cause = concat("Timed out after ", op->timeout.count(), " ms in ", describe(*op), state);
    }
    if (!cause.empty()) {
      memory_.abort(kind, cause);
      failAllLocked(finished);
      return;
    }
  }
}

/// The peer has left the group. What is bound may be an earlier group of the same name, whose end
/// says nothing of this one: then the peer has a while to come back.
bool PointToPoint::isGone(int rank, TimePoint now) {
  auto& since = peers_[static_cast<std::size_t>(rank)].goneSince;
  if (!memory_.hasLeft(rank)) {
    since.reset();
    return false;
  }
  if (memory_.isConfirmed(rank)) return true;
  if (!since) since = now;
  return now - *since > kComeBack;
}

/// Why nobody will answer the operation, or "".
std::string PointToPoint::causeOfSilence(const PointToPointOp& op, TimePoint now) {
  const bool any = op.peer == kAnySource;
  int absent = -1;
  int gone = 0;
  for (int rank = any ? 0 : op.peer; rank <= (any ? memory_.size() - 1 : op.peer); ++rank) {
    if (rank == memory_.rank()) continue;
    const bool dead = memory_.isDead(rank);
    if (!dead && !isGone(rank, now)) continue;
    absent = rank;
    if (dead) gone = memory_.size();  // one death is enough: the message may have been its
    ++gone;
  }
  if (absent < 0 || gone < (any ? memory_.size() - 1 : 1)) return "";
  return concat(memory_.causeOfSilence(absent), " in ", describe(op));
}

bool PointToPoint::hasPending() {
  std::lock_guard<std::mutex> lock(mutex_);
  return active();
}

bool PointToPoint::flush(TimePoint until) {
  for (;;) {
    bool all = true;
    for (int rank = 0; rank < memory_.size(); ++rank) {
      const PairChannel* out = peers_[static_cast<std::size_t>(rank)].out;
      if (out == nullptr || memory_.isDead(rank) || memory_.hasLeft(rank)) continue;
      // A send has ended when its last bytes are in the channel; the receiver has not read them
      // yet.
      all = all &&
            out->taken.load(std::memory_order_acquire) ==
                out->posted.load(std::memory_order_relaxed) &&
            out->drained.load(std::memory_order_acquire) ==
                out->streamed.load(std::memory_order_relaxed);
    }
    if (all || memory_.aborted()) return true;
    if (Clock::now() >= until) return false;
    std::this_thread::sleep_for(std::chrono::microseconds(200));
  }
}

}  // namespace fastcoll
