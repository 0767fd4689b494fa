#include "cpu/point_to_point/point_to_point.hpp"

#include <algorithm>
#include <utility>

#include "base/entry_lock.hpp"

namespace fastcoll {
namespace {

/// Rings of the default size to all peers take 32 MiB at most, in groups of up to 257 ranks.
std::size_t ringBytesFor(std::size_t wanted, int size) {
  const std::size_t peers = size - 1;
  constexpr std::size_t kLeast = 128 * 1024;
  const std::size_t share = wanted * 8 / std::max<std::size_t>(8, 2 * peers);
  return std::max(share, kLeast) / kPage * kPage;
}

}  // namespace

void PointToPointOp::reset() {
  source = -1;
  done.store(false, std::memory_order_relaxed);
  number_ = 0;
  moved_ = unasked_ = 0;
  begun_ = ended_ = bodyUnderWay_ = bodyAwaited_ = false;
  body_ = nullptr;
}

PointToPoint::PointToPoint(GroupMemory& memory, Rendezvous& rendezvous, Setup setup)
    : memory_(memory),
      rendezvous_(rendezvous),
      setup_(std::move(setup)),
      ringBytes_(ringBytesFor(setup_.ringBytes, memory.size())),
      peers_(memory.size()),
      mayBeBusy_(memory.size()) {}

PointToPoint::~PointToPoint() {
  stop();
}

std::string PointToPoint::describe(const PointToPointOp& op) const {
  const std::string peer = op.peer == kAnySource ? "any rank" : memory_.memberName(op.peer);
  return concat(op.send ? "send" : "recv", "(seq ", op.seq, ", ", dtypeName(op.dtype), "[",
                op.message.bytes() / elementSize(op.dtype), "], ", op.send ? "to " : "from ", peer,
                ", tag ", op.tag, ")");
}

PointToPoint::Lock::Lock(PointToPoint& of) : inner(lockAfterWait(of.mutex_)), of_(of) {}

void PointToPoint::Lock::unlock() {
  if (isSettled()) return inner.unlock();
  PointToPoint& of = of_;
  const Finished finished = std::exchange(of.finished_, {});
  const std::vector<int> checked = std::exchange(of.checked_, {});
  const bool finds = std::exchange(of.findsHere_, false);
  bool failing = of.failing_;
  inner.unlock();
  of.complete(finished);
  for (const int peer : checked) failing = of.memory_.hear(peer) || failing;
  if (failing && fails) of.failAll();
  if (finds) of.findPeers(true);
}

bool PointToPoint::Lock::isSettled() const {
  return of_.finished_.empty() && of_.checked_.empty() && !of_.failing_ && !of_.findsHere_;
}

void PointToPoint::Lock::wait(std::condition_variable& signal, TimePoint until) {
  if (isSettled()) {
    signal.wait_until(inner, until);
  } else {
    unlock();
    lock();
  }
}

void PointToPoint::submit(PointToPointRef op) {
  const Lock lock(*this);
  failed_ = false;
  op->place_ = all_.insert(all_.end(), op);
  if (op->send) {
    peers_[op->peer].sends.push_back(op);
  } else if (failing_ || !matchUnexpected(op)) {
    post(op);
  }
  if (op->peer != kAnySource) mayBeBusy_[op->peer] = 1;
  std::size_t before = 0;
  do {
    before = op->moved_;
    progress(false);
    // If no thread waits, none may make progress for a while. So this one writes all that goes
    // unasked.
  } while (!op->awaited && !op->ended_ && op->moved_ != before && op->moved_ < kEagerBytes);
  if (restless()) needBackground();
  // It sleeps on the doorbell of this host, which peers on other hosts do not ring.
  if (threadSleeps_ && anyElsewhere_) wakeBackground();
}

void PointToPoint::poll() {
  Lock lock(*this, std::try_to_lock);
  if (!lock.inner.owns_lock()) return;
  progress(true);
  serveNetwork();
  if (!failing_) return;
  // On another thread: abort hooks may wait for the GIL, which a thread that polls a work holds.
  failJob_ = failJob_ || startJob([this] { failAll(); });
  lock.fails = !failJob_;
}

void PointToPoint::complete(const Finished& finished) {
  if (finished.empty()) return;
  for (const auto& [op, fault] : finished) {
    op->complete(fault);
    op->done.store(true, std::memory_order_seq_cst);
  }
  // Other threads of this process may sleep until one of these operations ends.
  if (memory_.isOpen()) wake(memory_.rank());
  if (sleepers_.load(std::memory_order_seq_cst) == 0) return;
  {
    const std::unique_lock<std::mutex> lock = lockAfterWait(mutex_);
  }  // a thread that has checked before this sleeps by now
  changed_.notify_all();
}

/// Wakes the rank if it sleeps. No wake-up is lost: the sleeper announces itself and then checks
/// everything once more. The caller has stored (seq_cst) before it checks for sleepers.
void PointToPoint::wake(int rank) {
  const bool self = rank == memory_.rank();
  // A peer may have found this rank first. It cannot be woken before this rank has bound it, so it
  // polls until then.
  if (!self && !memory_.isBound(rank)) return;
  Doorbell& bell = memory_.doorbell(rank);
  if (bell.waiters.load(std::memory_order_seq_cst) == 0) return;
  bell.rings.fetch_add(1, std::memory_order_seq_cst);
  futexWakeAll(lowHalf(&bell.rings));
}

void PointToPoint::finish(const PointToPointRef& op) {
  // After a fault elsewhere the memory that was just read may already have been reused. That fault
  // counts, not this text.
  if (!op->send && memory_.aborted()) throw Error(ErrorKind::Backend, "the group has failed");
  end(op);
}

void PointToPoint::end(const PointToPointRef& op) {
  op->ended_ = true;
  finished_.emplace_back(op, nullptr);
  all_.erase(op->place_);
}

/// Does what can be done without waiting; false if that was nothing.
bool PointToPoint::progress(bool checksFaults) {
  ++turns_;
  if (!restless()) return false;
  if (failing()) {
    failing_ = failing_ || !failed_;
    return false;
  }
  bool moved = false, unmet = false;
  nextTurn_ = TimePoint::max();
  try {
    for (int rank = 0; rank < memory_.size(); ++rank) {
      if (anyReceives_ == 0 && mayBeBusy_[rank] == 0) continue;
      const Peer& peer = peers_[rank];
      const bool busy = anyReceives_ > 0 || peer.busy() || peer.unmet();
      if (busy && rank != memory_.rank()) moved = advancePeer(rank) || moved;
      mayBeBusy_[rank] = peer.busy() || peer.unmet() ? 1 : 0;
      unmet = unmet || peer.unmet();
    }
    if (checksFaults && !moved) checkFaults();
    unmet_ = unmet;
  } catch (const std::exception&) {
    unmet_ = true;
    if (active()) failWith(std::current_exception());  // else the next operation raises it
  }
  return moved || !finished_.empty();
}

bool PointToPoint::advancePeer(int rank) {
  Peer& peer = peers_[rank];
  if (!peer.isMet()) {
    // Collectives have met it. Or it has died, and what it wrote before counts.
    const bool met = memory_.isConfirmed(rank) ||
                     (memory_.isDead(rank) && memory_.isMutual(rank, memory_.nonceOf(rank)));
    if (met)
      setPlace(rank, Place::Here);
    else
      needPeers();
  }
  if (peer.place == Place::Elsewhere) return advanceRemote(rank);
  if (peer.place == Place::NotYet) return false;
  bool moved = advanceSends(rank);  // even before it is Here: the channel is own memory
  if (peer.place == Place::Here && !peer.in) {
    const std::uint64_t offset =
        memory_.block(rank).link(memory_.rank()).channel.load(std::memory_order_acquire);
    if (offset == 0) return moved;
    peer.inChannel =
        reinterpret_cast<PairChannel*>(memory_.inPeer(rank, offset, sizeof(PairChannel)));
    peer.inChannel->full.store(full_ ? 1 : 0, std::memory_order_relaxed);
    peer.in.emplace(*peer.inChannel, peer.cells);
  }
  if (!peer.in) return moved;
  bool received = takeRecords(rank);
  received = pull(peer) || received;
  received = answer(peer) || received;
  if (received) wake(rank);
  return moved || received;
}

bool PointToPoint::hasPending() {
  std::lock_guard<std::mutex> lock(mutex_);
  return active();
}

}  // namespace fastcoll
