// Faults of point-to-point: a peer dies or leaves, an operation times out, or the group has failed.
#include <algorithm>
#include <utility>

#include "base/entry_lock.hpp"
#include "cpu/point_to_point/point_to_point.hpp"

namespace fastcoll {
namespace {
constexpr Milliseconds kReturn{1000};
}  // namespace

/// Ends all operations with the group's fault, once no other thread uses their memory. First passes
/// the fault on, because each rank has met only those that it exchanges messages with. A receiver
/// may be reading a message in place, in this rank's arena. It must get the fault before the
/// sender's caller may write there again. Otherwise it would report success for what it read.
void PointToPoint::failAll() {
  beforeWait();
  Finished failed;
  {
    const std::lock_guard<std::mutex> one(failMutex_);
    std::unique_lock<std::mutex> lock(mutex_);
    const std::optional<Fault> own = fault_;
    lock.unlock();
    if (own && !memory_.aborted()) memory_.abort(own->kind, own->text);
    memory_.passOn();
    const Fault fault = memory_.recorded();
    // Before other hosts detect the closed connections.
    if ((own || anyElsewhere_) && !std::exchange(published_, true)) setup_.faults.publish(fault);
    lock.lock();
    closeUnused(lock);
    failing_ = false;
    failed_ = true;
    for (auto next = all_.begin(); next != all_.end();) {
      const PointToPointRef op = *next++;
      // The network may still use its memory: fail it later, when the channel is closed.
      if (op->bodyUnderWay_ && peers_[op->other()].remote.channel) continue;
      failed.emplace_back(
          op, std::make_exception_ptr(Error(
                  fault.kind, errorSite(op->send ? "send" : "recv", memory_.identity(), op->seq),
                  fault.text)));
      op->ended_ = true;
      all_.erase(op->place_);
    }
    for (auto& posted : receives_) posted.reset();
    for (auto& waiting : unexpected_) waiting.clear();
    anyReceives_ = 0;
    held_ = 0;
    for (Peer& peer : peers_) {
      peer.sends.clear();
      peer.asking.clear();
      peer.answered.clear();
      peer.open.clear();
      peer.pulls.clear();
      peer.wanted.clear();
      peer.receives = 0;
      peer.latest = nullptr;
    }
  }
  if (failed.empty()) return;
  setup_.faults.failing();
  complete(failed);
}

/// Notes a fault, which counts unless another rank's fault came first. Lock::unlock() ends all
/// operations with it.
void PointToPoint::fail(ErrorKind kind, const std::string& cause) {
  if (!fault_) fault_ = Fault{kind, cause};
  failing_ = true;
}

/// Fails with an error of this rank, or with the fault that another rank has reported. Other ranks
/// raise it too, so the text of an own one names this rank.
void PointToPoint::failWith(const std::exception_ptr& fault) {
  try {
    std::rethrow_exception(fault);
  } catch (const Rendezvous::GroupLost& error) {
    fail(error.kind(), error.cause());
  } catch (const Error& error) {
    fail(error.kind(), concat(memory_.memberName(memory_.rank()), ": ", error.cause()));
  } catch (const std::exception& error) {
    fail(ErrorKind::Backend, concat(memory_.memberName(memory_.rank()), ": ", error.what()));
  }
}

// Fails if a peer of a pending operation has died or left, or if an operation has timed out.
void PointToPoint::checkFaults() {
  const auto now = Clock::now();
  for (const PointToPointRef& op : all_) {
    const bool any = op->peer == kAnySource;
    if (!any && (checked_.empty() || checked_.back() != op->peer)) checked_.push_back(op->peer);
    std::string cause = causeOfSilence(*op, now);
    // What the peer wrote before it ended counts. The next call checks the rest.
    if (!cause.empty() && !any && advancePeer(op->peer)) return;
    ErrorKind kind = ErrorKind::Backend;
    if (cause.empty() && now >= op->deadline) {
      kind = ErrorKind::Timeout;
      std::string state;
      if (!any && memory_.isBound(op->peer)) {
        state = concat(" (state ", memory_.process(op->peer).state(), ")");
      } else if (!any) {
        const bool met = peers_[op->peer].remote.channel != nullptr;
        state = met ? "" : ", which has not used the group for point-to-point with this rank";
      }
      cause = concat("Timed out after ", op->timeout.count(), " ms in ", describe(*op), state,
                     ". Check that the peer makes the matching call, or raise the timeout.");
    }
    if (!cause.empty()) return fail(kind, cause);
  }
}

/// Whether the peer has left the group. The bound block may be of an earlier group of the same
/// name, whose end does not concern this one. Then the peer has kReturn to come back.
bool PointToPoint::hasLeft(int rank, TimePoint now) {
  const Peer& peer = peers_[rank];
  if (peer.place == Place::Elsewhere) return peer.remote.hasLeft();
  auto& since = peers_[rank].leftSince;
  if (!memory_.hasLeft(rank)) {
    since.reset();
    return false;
  }
  if (memory_.isConfirmed(rank)) return true;
  if (!since) since = now;
  return now - *since > kReturn;
}

/// Why no peer will answer the operation, or "".
std::string PointToPoint::causeOfSilence(const PointToPointOp& op, TimePoint now) {
  // The whole body may have arrived, and its thread may be about to report that.
  if (op.bodyUnderWay_ && !peers_[op.other()].remote.isLost()) return "";
  const bool any = op.peer == kAnySource;
  int absent = -1;
  int ended = 0;
  for (int rank = any ? 0 : op.peer; rank <= (any ? memory_.size() - 1 : op.peer); ++rank) {
    if (rank == memory_.rank()) continue;
    const bool dead = memory_.isDead(rank);
    if (!dead && !hasLeft(rank, now)) continue;
    absent = rank;
    if (dead) ended = memory_.size();  // one death is enough: that rank may have been the sender
    ++ended;
  }
  if (absent < 0 || ended < (any ? memory_.size() - 1 : 1)) return "";
  return memory_.causeOfSilence(absent, describe(op));
}

/// Records that the connection to the peer is lost. That is a fault if an operation needs the peer,
/// and the peer has sent no close notice.
void PointToPoint::noteLost(int rank, const std::string& text) {
  PeerConnection& remote = peers_[rank].remote;
  remote.lose(text);
  const auto concerns = [rank](const PointToPointRef& op) {
    return op->peer == rank || op->source == rank || (op->peer == kAnySource && op->source < 0);
  };
  if (remote.hasLeft() || remote.explaining || stopping_ || failing() ||
      std::ranges::none_of(all_, concerns)) {
    return;
  }
  remote.explaining = startJob([this, rank, why = remote.cause] {
    const Fault fault = setup_.faults.explain(rank, why);
    const Lock lock(*this);
    fail(fault.kind, fault.text);
  });
  // Without a thread, fail without the cause.
  if (!remote.explaining)
    fail(ErrorKind::Backend, brokeOff(memory_.memberName(rank), remote.cause));
}

}  // namespace fastcoll
