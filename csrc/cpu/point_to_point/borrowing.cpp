// The connections of point-to-point, as collectives borrow them.
#include <algorithm>

#include "cpu/point_to_point/point_to_point.hpp"

namespace fastcoll {

bool PointToPoint::borrow(int rank) {
  const Lock lock(*this);
  PeerConnection& remote = peers_[rank].remote;
  if (remote.borrowed) return true;
  if (remote.isLost()) throw ConnectionLost(ErrorKind::Backend, remote.cause);
  anyElsewhere_ = true;
  remote.wanted = !remote.isConnected();
  if (remote.wanted) {
    needPeers();
    return false;
  }
  if (failing() || stopping_) return false;  // the channel is about to be closed
  remote.borrowed = true;
  ++remote.users;
  return true;
}

void PointToPoint::awaitConnection(TimePoint until) {
  std::unique_lock<std::mutex> lock(mutex_);
  const auto came = [](const Peer& peer) {
    const PeerConnection& remote = peer.remote;
    return remote.wanted && (remote.isConnected() || remote.isLost());
  };
  changed_.wait_until(lock, until,
                      [&] { return memory_.aborted() || std::ranges::any_of(peers_, came); });
}

TransferRef PointToPoint::transfer(int rank, bool sends, void* data, std::size_t bytes) {
  const std::lock_guard<std::mutex> lock(mutex_);
  Connection& connection = peers_[rank].remote.channel->connection();
  const int tag = RemoteChannel::longTag(bytes);
  return sends ? connection.send(data, bytes, tag) : connection.receive(data, bytes, tag);
}

void PointToPoint::giveBack() noexcept {
  Lock lock(*this);
  bool borrowed = false;
  for (Peer& peer : peers_) {
    PeerConnection& remote = peer.remote;
    remote.wanted = false;
    if (!remote.borrowed) continue;
    remote.borrowed = false;
    --remote.users;
    borrowed = true;
  }
  if (!borrowed) return;
  leave(lock);
  // After a fault the last user of a channel detects it soon and closes the channel. If the abort
  // came when there was no user, this thread closes it.
  const auto open = [](const Peer& peer) { return peer.remote.channel != nullptr; };
  while (memory_.aborted() && std::ranges::any_of(peers_, open)) {
    lock.unlock();
    failAll();
    lock.lock();
    if (std::ranges::any_of(peers_, open)) changed_.wait_for(lock.inner, kSlice);
  }
}

}  // namespace fastcoll
