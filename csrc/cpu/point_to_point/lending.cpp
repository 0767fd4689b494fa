// The connections of point-to-point, lent to collectives.
#include <algorithm>

#include "cpu/point_to_point/point_to_point.hpp"

namespace fastcoll {

bool PointToPoint::borrow(int rank) {
  const std::lock_guard<std::mutex> lock(mutex_);
  Peer& peer = peers_[rank];
  if (peer.lent) return true;
  if (!peer.lost.empty()) throw ConnectionLost(ErrorKind::Backend, peer.lost);
  anyElsewhere_ = true;
  peer.asked = peer.channel == nullptr;
  if (peer.asked) {
    needConnections();
    return false;
  }
  if (memory_.aborted() || stopping_) return false;  // the channel is about to be closed
  peer.lent = true;
  ++peer.users;
  return true;
}

void PointToPoint::awaitConnection(TimePoint until) {
  Lock lock(mutex_);
  const auto came = [](const Peer& peer) {
    return peer.asked && (peer.channel || !peer.lost.empty());
  };
  changed_.wait_until(lock, until,
                      [&] { return memory_.aborted() || std::ranges::any_of(peers_, came); });
}

TransferRef PointToPoint::sendTo(int rank, const void* data, std::size_t bytes) {
  const std::lock_guard<std::mutex> lock(mutex_);
  return peers_[rank].channel->connection().send(data, bytes, RemoteChannel::longTag(bytes));
}

TransferRef PointToPoint::receiveFrom(int rank, void* data, std::size_t bytes) {
  const std::lock_guard<std::mutex> lock(mutex_);
  return peers_[rank].channel->connection().receive(data, bytes, RemoteChannel::longTag(bytes));
}

void PointToPoint::giveBack() noexcept {
  Finished finished;
  {
    Lock lock(mutex_);
    bool lent = false;
    for (Peer& peer : peers_) {
      peer.asked = false;
      if (!peer.lent) continue;
      peer.lent = false;
      --peer.users;
      lent = true;
    }
    if (!lent) return;
    leave(finished);
    // After a fault the last user of a channel detects it soon and closes the channel. If the abort
    // came when there was no user, this thread closes it.
    const auto open = [](const Peer& peer) { return peer.channel != nullptr; };
    while (memory_.aborted() && std::ranges::any_of(peers_, open)) {
      changed_.wait_for(lock, Milliseconds(20));
      leave(finished);
    }
  }
  complete(finished);
}

}  // namespace fastcoll
