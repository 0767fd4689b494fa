// The state of the messages between this rank and one peer. PointToPoint's lock guards all of it.
//
// The connection to a peer on another host:
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

#include <cstdint>
#include <deque>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "cpu/point_to_point/pair_ring.hpp"
#include "cpu/point_to_point/remote_channel.hpp"
#include "group/rendezvous.hpp"

namespace fastcoll {

class PointToPointOp;
using PointToPointRef = std::shared_ptr<PointToPointOp>;

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

/// A message without a matching receive, and the bytes of it that have arrived.
struct Unexpected {
  int source;
  std::uint64_t number;
  RecordHead head;
  std::unique_ptr<std::uint8_t[]> payload = nullptr;
  std::size_t held = 0;  // bytes in `payload`
};

struct Peer {
  using Place = Rendezvous::Met;
  std::deque<PointToPointRef> sends;     // in order; the first may have begun
  std::vector<PointToPointRef> asking;   // sends that await the receiver's answer
  std::deque<PointToPointRef> answered;  // sends whose rest the receiver wants, in that order
  std::uint64_t sent = 0;                // messages begun
  std::deque<PointToPointRef> open;      // matched receives whose rest comes through the ring
  std::deque<std::pair<PointToPointRef, const std::uint8_t*>> pulls;  // receives read in place
  std::deque<std::uint64_t> wanted;     // answers for which there was no room yet
  std::uint64_t arrived = 0;            // messages that have begun to arrive
  Unexpected* latest = nullptr;         // the last of them, while it has no receive
  std::size_t receives = 0;             // unmatched ones that name this peer
  std::optional<TimePoint> waitsSince;  // when the ring's next message began to wait
  PairChannel* outChannel = nullptr;    // own channel to the peer
  PairChannel* inChannel = nullptr;     // the peer's channel to this rank
  std::optional<PairWriter> out;
  std::optional<PairReader> in;
  bool large = false;                  // `out` writes into the large ring
  bool refused = false;                // memory for that was refused
  PairCells cells;                     // of both directions, with a peer on this host
  std::optional<TimePoint> leftSince;  // since when it has left, if it may come back
  Place place = Place::NotYet;
  PeerConnection remote;
  /// Whether an operation with the peer is pending.
  bool busy() const {
    return receives > 0 || !sends.empty() || !asking.empty() || !answered.empty() ||
           !open.empty() || !pulls.empty();
  }
  bool isMet() const { return place == Place::Here || place == Place::Elsewhere; }
  /// Whether there is a channel to it that it cannot find yet: both must mean each other's
  /// instance first.
  bool unmet() const { return out.has_value() && !isMet(); }
  /// Whether a record of the peer is expected: a message, or a credit for a send.
  bool expects(bool any) const { return any || receives > 0 || !sends.empty(); }
};

}  // namespace fastcoll
