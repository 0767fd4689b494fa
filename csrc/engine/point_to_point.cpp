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
