// Send and receive between the ranks of a group over shared memory: matching by source and tag, any
// number of messages under way in both directions, independent of the group's collectives.
//
// All state is advanced by progress(), a function that never waits. Whoever waits for a message
// calls it; when nobody waits, a background thread does, so that an isend ends without its wait().
#pragma once

#include <condition_variable>
#include <cstdint>
#include <deque>
#include <exception>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "../base/clock.hpp"
#include "../transport/group_memory.hpp"
#include "../transport/message.hpp"
#include "../transport/pair_channel.hpp"
#include "../transport/rendezvous.hpp"

namespace fastcoll {

constexpr int kAnySource = -1;

/// One send or receive. The engine fills `source` and calls complete() exactly once.
class PointToPointOp {
 public:
  virtual ~PointToPointOp() = default;
  /// Called outside the engine's lock, on whichever thread finished the message.
  virtual void complete(std::exception_ptr fault) noexcept = 0;

  bool send = false;
  int peer = kAnySource;
  int tag = 0;
  DType dtype = DType::UInt8;
  std::uint64_t seq = 0;
  Message message;
  Milliseconds timeout{};
  TimePoint deadline;
  int source = -1;  // of a receive, once matched
  std::atomic<bool> done{false};

 private:
  friend class PointToPoint;
  std::uint64_t number_ = 0;  // of a send among those to its peer
  bool posted_ = false;
  std::size_t moved_ = 0;  // bytes streamed or drained
};

using PointToPointRef = std::shared_ptr<PointToPointOp>;

class PointToPoint {
 public:
  PointToPoint(GroupMemory& memory, Rendezvous& rendezvous, int spinMicros);
  ~PointToPoint();

  /// Takes the operation and does at once what can be done without waiting.
  void submit(PointToPointRef op);
  /// Waits until the operation is done (true) or `until` has passed (false), making progress.
  bool wait(const PointToPointOp& op, TimePoint until);
  /// Makes progress without waiting, unless another thread is at it.
  void poll();
  /// Fails all operations with the group's fault; called after GroupMemory::abort.
  void failAll();
  /// Waits until the receivers have taken all messages that sends left in the channels.
  bool flush(TimePoint until);
  bool hasPending();
  /// Ends the background thread.
  void stop();

 private:
  struct Unexpected {
    int source;
    std::uint64_t number;
    int tag;
    DType dtype;
    std::uint64_t bytes;
    std::vector<std::uint8_t> payload;  // of inline messages
  };
  struct Peer {
    std::deque<PointToPointRef> sends;  // in order; the front ones may be posted already
    PointToPointRef streaming;          // the send that the receiver granted
    PairChannel* out = nullptr;         // own channel to the peer
    PairChannel* in = nullptr;          // the peer's channel to this rank
    bool paired = false;
    TimePoint nextTry;  // of pairing
    int tries = 0;
    std::optional<TimePoint> goneSince;  // while it is not known to mean this group
    std::deque<std::pair<std::uint64_t, PointToPointRef>> granted;  // matched large receives
  };
  using Finished = std::vector<std::pair<PointToPointRef, std::exception_ptr>>;

  void progress(Finished& finished);
  void advancePeer(int rank, Finished& finished);
  void tryPair(int rank);
  void advanceSends(int rank, Finished& finished);
  void stream(int rank, Finished& finished);
  void takeDescriptors(int rank, Finished& finished);
  void drain(int rank, Finished& finished);
  bool matchUnexpected(const PointToPointRef& op, Finished& finished);
  void deliver(const PointToPointRef& op, Unexpected&& message, Finished& finished);
  void finish(const PointToPointRef& op, Finished& finished);
  void checkFaults(Finished& finished);
  std::string causeOfSilence(const PointToPointOp& op, TimePoint now);
  bool isGone(int rank, TimePoint now);
  void failAllLocked(Finished& finished);
  void complete(Finished& finished);
  void ring(int rank);
  void serveInBackground();
  bool active() const { return pending_ > 0; }
  std::string describe(const PointToPointOp& op) const;

  GroupMemory& memory_;
  Rendezvous& rendezvous_;
  const int spinMicros_;

  std::mutex mutex_;
  std::vector<Peer> peers_;
  std::deque<PointToPointRef> receives_;  // posted and unmatched, in order
  std::deque<Unexpected> unexpected_;     // in order of arrival
  std::size_t pending_ = 0;
  bool unpaired_ = false;             // some active peer is not paired yet
  std::vector<PointToPointRef> all_;  // every operation that is not done

  std::atomic<int> waiters_{0};
  std::condition_variable background_;
  std::thread thread_;
  bool threadRuns_ = false;
  bool stopping_ = false;
};

}  // namespace fastcoll
