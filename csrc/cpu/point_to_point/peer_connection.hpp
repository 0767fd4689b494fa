// The connection to a peer on another host, and its uses. PointToPoint's lock guards all of it.
//
//   state       meaning                   operations                 next
//   None        not needed, or not yet    wait                       Connecting, when both ranks
//                                                                    have posted that they want it
//   Connecting  a job waits for the peer  wait                       Connected or Lost
//   Connected   `channel` is open         send, receive, read,       Lost, by an error; None, at
//                                         borrow                     the end of the group
//   Lost        broke, or was never made  fail, unless the peer has  -
//                                         sent its close notice
//
// These functions of PointToPoint change the state: findPeers() and connectTo(); noteLost() and
// flushRemote() after an error; closeUnused() at the end.
#pragma once

#include <memory>
#include <string>
#include <utility>

#include "cpu/point_to_point/remote_channel.hpp"

namespace fastcoll {

struct PeerConnection {
  enum class State { None, Connecting, Connected, Lost };

  State state = State::None;
  /// Of a lost connection too, until no thread uses it.
  std::unique_ptr<RemoteChannel> channel;
  std::string cause;        // how it was lost
  bool wanted = false;      // by a collective
  bool borrowed = false;    // by a collective, which counts as a user
  bool reading = false;     // a thread waits for the next record
  bool explaining = false;  // a thread finds out why it was lost
  int users = 0;            // threads that use the channel without the lock

  bool isConnected() const { return state == State::Connected; }
  bool isLost() const { return state == State::Lost; }
  /// Whether the peer has sent its close notice.
  bool hasLeft() const { return channel != nullptr && channel->peerClosed(); }
  /// Whether a thread may wait for the next record.
  bool mayRead() const { return isConnected() && !reading && !hasLeft(); }

  void open(std::unique_ptr<RemoteChannel> made) {
    channel = std::move(made);
    state = State::Connected;
  }
  void lose(const std::string& how) {
    if (!isLost()) cause = how.empty() ? "it closed" : how;
    state = State::Lost;
  }
};

}  // namespace fastcoll
