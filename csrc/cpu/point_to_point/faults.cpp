// Faults of point-to-point: a peer dies or leaves, an operation times out, or the group has failed.
#include <algorithm>
#include <utility>

#include "base/entry_lock.hpp"
#include "cpu/point_to_point/point_to_point.hpp"

namespace fastcoll {
namespace {
constexpr Milliseconds kComeBack{1000};
}  // namespace

void PointToPoint::failAll() {
  Finished finished;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    failAllLocked(finished);
  }
  complete(finished);
}

/// Publishes the fault, once, to ranks that share no memory with this one.
void PointToPoint::publishFault() {
  beforeWait();
  if (!std::exchange(published_, true)) setup_.faults.publish(memory_.recorded());
}

void PointToPoint::failAllLocked(Finished& finished) {
  // Pass the fault on to all peers, because each rank has met only those that it exchanges messages
  // with. A receiver may be reading a message in place, in this rank's arena. It must see the fault
  // before the sender's caller may write there again. Otherwise it would report success for what it
  // read.
  beforeWait();
  memory_.passOn();
  if (anyElsewhere_) publishFault();  // before they detect the closed connections
  closeUnused();
  for (auto next = all_.begin(); next != all_.end();) {
    const PointToPointRef op = *next++;
    // The network may still use its memory: fail it later, when the channel is closed.
    const int peer = op->send ? op->peer : op->source;
    if (op->bodyUnderWay_ && peers_[peer].remote.channel) continue;
    try {
      memory_.throwAborted(errorSite(op->send ? "send" : "recv", memory_.identity(), op->seq));
    } catch (...) {
      finished.emplace_back(op, std::current_exception());
    }
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

void PointToPoint::fail(ErrorKind kind, const std::string& cause, Finished& finished) {
  memory_.abort(kind, cause);
  publishFault();
  failAllLocked(finished);
}

/// Fails with an error of this rank, or with the fault that another rank has told. Other ranks
/// raise it too, so the text of an own one names this rank.
void PointToPoint::failWith(const std::exception& error, Finished& finished) {
  const auto* const known = dynamic_cast<const Error*>(&error);
  std::string cause = known != nullptr ? known->cause() : error.what();
  const bool ofAnother = dynamic_cast<const Rendezvous::GroupLost*>(&error) != nullptr;
  if (!ofAnother) cause = concat(memory_.memberName(memory_.rank()), ": ", cause);
  fail(known != nullptr ? known->kind() : ErrorKind::Backend, cause, finished);
}

void PointToPoint::failWith(const std::exception_ptr& error, Finished& finished) {
  try {
    std::rethrow_exception(error);
  } catch (const std::exception& known) {
    failWith(known, finished);
  }
}

// Fails if a peer of a pending operation has died or left, or if an operation has timed out.
void PointToPoint::checkFaults(Finished& finished) {
  const auto now = Clock::now();
  for (const PointToPointRef& op : all_) {
    if (op->peer != kAnySource && memory_.hear(op->peer)) return failAllLocked(finished);
    std::string cause = causeOfSilence(*op, now);
    // What the peer wrote before it ended counts. The next call checks the rest.
    if (!cause.empty() && op->peer != kAnySource && advancePeer(op->peer, finished)) return;
    ErrorKind kind = ErrorKind::Backend;
    if (cause.empty() && now >= op->deadline) {
      kind = ErrorKind::Timeout;
      std::string state;
      if (op->peer != kAnySource && memory_.isBound(op->peer)) {
        state = concat(" (state ", memory_.process(op->peer).state(), ")");
      } else if (op->peer != kAnySource) {
        const bool met = peers_[op->peer].remote.channel != nullptr;
        state = met ? "" : ", which has not used the group for point-to-point with this rank";
      }
      cause = concat("Timed out after ", op->timeout.count(), " ms in ", describe(*op), state,
                     ". Check that the peer makes the matching call, or raise the timeout.");
    }
    if (!cause.empty()) return fail(kind, cause, finished);
  }
}

/// Whether the peer has left the group. The bound block may be of an earlier group of the same
/// name, whose end does not concern this one. Then the peer has kComeBack to come back.
bool PointToPoint::isGone(int rank, TimePoint now) {
  const Peer& peer = peers_[rank];
  if (peer.place == Place::Elsewhere) return peer.remote.hasLeft();
  auto& since = peers_[rank].goneSince;
  if (!memory_.hasLeft(rank)) {
    since.reset();
    return false;
  }
  if (memory_.isConfirmed(rank)) return true;
  if (!since) since = now;
  return now - *since > kComeBack;
}

/// Why no peer will answer the operation, or "".
std::string PointToPoint::causeOfSilence(const PointToPointOp& op, TimePoint now) {
  // The whole body may have arrived, and its thread may be about to report that.
  const int other = op.send ? op.peer : op.source;
  if (op.bodyUnderWay_ && !peers_[other].remote.isLost()) return "";
  const bool any = op.peer == kAnySource;
  int absent = -1;
  int gone = 0;
  for (int rank = any ? 0 : op.peer; rank <= (any ? memory_.size() - 1 : op.peer); ++rank) {
    if (rank == memory_.rank()) continue;
    const bool dead = memory_.isDead(rank);
    if (!dead && !isGone(rank, now)) continue;
    absent = rank;
    if (dead) gone = memory_.size();  // one death is enough: that rank may have been the sender
    ++gone;
  }
  if (absent < 0 || gone < (any ? memory_.size() - 1 : 1)) return "";
  return memory_.causeOfSilence(absent, describe(op));
}

/// Records that the connection to the peer is lost. That is a fault if an operation needs the peer,
/// and the peer has sent no close notice.
void PointToPoint::noteLost(int rank, const std::string& text, Finished& finished) {
  PeerConnection& remote = peers_[rank].remote;
  remote.lose(text);
  const auto concerns = [rank](const PointToPointRef& op) {
    return op->peer == rank || op->source == rank || (op->peer == kAnySource && op->source < 0);
  };
  if (remote.hasLeft() || remote.explaining || stopping_ || memory_.aborted() ||
      std::ranges::none_of(all_, concerns)) {
    return;
  }
  try {
    startJob([this, rank, why = remote.cause] {
      const Fault fault = setup_.faults.explain(rank, why);
      Finished failed;
      {
        const std::lock_guard<std::mutex> lock(mutex_);
        fail(fault.kind, fault.text, failed);
      }
      complete(failed);
    });
    remote.explaining = true;
  } catch (const std::exception&) {  // no thread: fail without the cause
    fail(ErrorKind::Backend, brokeOff(memory_.memberName(rank), remote.cause), finished);
  }
}

}  // namespace fastcoll
