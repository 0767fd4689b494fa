// Send and receive between two ranks of a group, matched by source and tag. Any number of messages
// may be in flight in both directions, independent of the group's collectives. Ranks of a host
// exchange messages over shared memory, other ranks over a connection of the two. No third rank
// takes part.
//
// progress() advances all state. It never waits and moves a bounded number of bytes, so sending and
// receiving take turns. Threads that wait for a message call it. If none has for a while, a
// background thread does, so an isend ends without its wait().
//
// One lock guards all state, and its holder waits for no other thread, rank or host:
//   - A fault is noted with fail(). Lock::unlock() then calls failAll(), which records and sends it
//     without the lock. Until that has ended, no message proceeds: see failing().
//   - Lock::unlock() completes the operations that have ended, because that calls back.
//   - Pooled threads meet peers and connect with them (connecting.cpp).
//   - A thread that waits on a connection, or closes it, counts as its user: see withoutLock().
//
// How a message goes (see pair_channel.hpp for the ring):
//   up to kSmallBytes   in one record; the send ends at once
//   up to kEagerBytes   in eager records of up to 64 KiB; the send ends with the last
//   longer              the first kEagerBytes eagerly, the rest once the receiver has matched it
//                       (half of the ring eagerly, in groups so large that this is less)
//   in the arena        the receiver reads it in place, if it is contiguous and longer than
//                       kCopiedBytes; the send ends after that
// While the receiver holds many unexpected messages, nothing longer than kSmallBytes is eager.
//
// To another host (see remote_channel.hpp) a message of up to kRecordBytes goes in one record,
// which ends its send. A longer message is announced by a record. Its body goes separately, from
// memory to memory. A thread that waits for a message reads the records of its peer, and waits on
// the network for its body. Pooled threads do both for messages without a waiter. Collectives
// borrow these connections for their long messages (cpu/hosts/long_messages.hpp).
//
// The place of a peer decides how its messages go. Only setPlace() changes it, under the lock.
//
//   place      meaning                       messages                      next
//   NotYet     has not created the group     wait                          any, by tryMeet()
//   Pairing    on this host; not bound, or   written to the own channel;   Here, by tryMeet() or
//              may mean an earlier instance  none is read                  by a collective
//   Here       on this host, and bound       through shared memory         -
//   Elsewhere  on another host               over its connection: see      Pairing, if tryConnect()
//                                            peer.hpp                      finds it on this host
//
// A peer has a connection apart from its place: a collective may connect with a peer that no
// message has met. It may also connect with one that is Here, if the ranks of this host have agreed
// later to share no memory in collectives.
#pragma once

#include <array>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <exception>
#include <functional>
#include <limits>
#include <list>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "base/clock.hpp"
#include "cpu/point_to_point/peer.hpp"
#include "cpu/spin_time.hpp"
#include "group/group_faults.hpp"
#include "group/rendezvous.hpp"
#include "network/connection.hpp"
#include "shm/group_memory.hpp"
#include "shm/message.hpp"
#include "trace/trace.hpp"

namespace fastcoll {

constexpr int kAnySource = -1;

/// One send or receive. The engine fills `source` and calls complete() exactly once.
class PointToPointOp {
 public:
  virtual ~PointToPointOp() = default;
  /// Called outside PointToPoint's lock, on the thread that ended the message.
  virtual void complete(std::exception_ptr fault) noexcept = 0;
  /// Prepares an operation that is done for another submit(). No other thread may refer to it.
  void reset();

  bool send = false;
  int peer = kAnySource;
  int tag = 0;
  DType dtype = DType::UInt8;
  std::uint64_t seq = 0;
  Message message;
  Milliseconds timeout{};
  TimePoint deadline;
  bool awaited = false;  // a thread waits for it as soon as it is submitted
  int source = -1;       // of a receive, once matched
  std::atomic<bool> done{false};
  trace::RecordId trace = 0;

 private:
  friend class PointToPoint;
  /// The other rank, or kAnySource as long as that is not known.
  int other() const { return send ? peer : std::max(source, peer); }
  std::list<PointToPointRef>::iterator place_;  // in PointToPoint::all_
  std::uint64_t number_ = 0;     // of the message among those from its sender to its receiver
  std::size_t moved_ = 0;        // bytes written to the ring, or to the receiver's tensor
  std::size_t unasked_ = 0;      // bytes that are sent before the receiver has answered
  bool begun_ = false;           // of a send: its first record is written
  bool ended_ = false;           // complete() is about to be called
  bool bodyUnderWay_ = false;    // from memory to memory, to or from another host
  bool bodyAwaited_ = false;     // a thread waits for `body_`, or is about to
  TransferRef body_;             // set until it has ended, or its channel is closed
  std::atomic<int> waiters_{0};  // threads that wait for the operation, and so for its body
};

class PointToPoint {
 public:
  static constexpr std::size_t kRingBytes = std::size_t{2} << 20;
  /// Most bytes of a message that go to a receiver before it has matched the message.
  static constexpr std::size_t kEagerBytes = 512 * 1024;
  /// Messages in the arena that are longer than this are read in place, not copied into the ring.
  static constexpr std::size_t kCopiedBytes = 16 * 1024;

  /// To another host: most bytes of a message in one record. The second limit holds while the
  /// receiver holds many unexpected messages.
  static constexpr std::size_t kRecordBytes = RemoteChannel::kPayloadBytes;
  static constexpr std::size_t kRecordBytesWhenFull = 4096;

  struct Setup {
    GroupFaults& faults;
    Network& network;  // to other hosts
    SpinTime& spin;
    /// Its threads lock this, to keep alive what this object refers to.
    std::weak_ptr<void> owner;
    /// Size of the ring to each peer that is sent more than small messages. It is less in groups so
    /// large that their rings would take much memory.
    std::size_t ringBytes = kRingBytes;
    StoresChoice stores = StoresChoice::Auto;
    /// From this size on, received messages are written past the caches (TuningTable).
    std::size_t streamingBytes = std::numeric_limits<std::size_t>::max();
  };
  PointToPoint(GroupMemory& memory, Rendezvous& rendezvous, Setup setup);
  ~PointToPoint();

  // borrowing.cpp: connections to ranks of other hosts, for the collective that runs
  /// Borrows the connection to the rank; false if there is none yet. One is then made as soon as
  /// the rank borrows it, too. Throws what prevents it.
  bool borrow(int rank);
  /// Waits until a wanted connection is made, or until `until`.
  void awaitConnection(TimePoint until);
  /// Sends or receives over a borrowed connection. Matched with each other only, by length.
  TransferRef transfer(int rank, bool sends, void* data, std::size_t bytes);
  /// Gives all connections back. If the group has failed, no thread uses a transfer's memory
  /// afterwards.
  void giveBack() noexcept;

  /// Posts the operation and makes progress without waiting. If the caller waits for the operation
  /// at once, this is one turn. Else it takes turns as long as they move the operation, until it
  /// has ended or all that goes unasked is written.
  void submit(PointToPointRef op);
  /// Waits until the operation is done (true) or `until` has passed (false), making progress.
  bool wait(const PointToPointRef& op, TimePoint until);
  /// Makes progress without waiting, unless another thread holds the lock.
  void poll();
  /// Fails all operations with the group's fault; called after GroupMemory::abort.
  void failAll();
  /// Waits until the receivers have taken all messages that sends left in the channels.
  bool flush(TimePoint until);
  bool hasPending();
  /// Ends the background thread.
  void stop();

 private:
  using Place = Rendezvous::Met;
  using Finished = std::vector<std::pair<PointToPointRef, std::exception_ptr>>;

  /// The lock. unlock() then does what its holder left to do, and must not do itself.
  class Lock {
   public:
    explicit Lock(PointToPoint& of);
    Lock(PointToPoint& of, std::try_to_lock_t) : inner(of.mutex_, std::try_to_lock), of_(of) {}
    ~Lock() {
      if (inner.owns_lock()) unlock();
    }
    void lock() { inner.lock(); }
    void unlock();
    /// Waits for the signal until `until`, or does what is left to do.
    void wait(std::condition_variable& signal, TimePoint until);
    bool isSettled() const;  // nothing is left to do

    std::unique_lock<std::mutex> inner;
    bool fails = true;  // unlock() may fail the group

   private:
    PointToPoint& of_;
  };

  // progress() writes so many bytes of pieces to a peer, and the first record of each message that
  // it begins. It reads as many bytes. So in an exchange of long messages both ranks send and
  // receive in turn, and their cells pass back and forth.
  static constexpr std::size_t kTurnBytes = PairCells::kBytes;
  static constexpr std::size_t kTagHashes = 64;
  static std::size_t hashOf(int tag) {  // Knuth's multiplicative hash, its 6 highest bits
    return (static_cast<std::uint32_t>(tag) * 2654435769U) >> 26;
  }
  // How often a wait on the network checks whether the group has failed or is shut down.
  static constexpr Milliseconds kSlice{20};
  // progress() reads so many bytes in place in a peer's arena.
  static constexpr std::size_t kPullBytes = std::size_t{1} << 20;

  // point_to_point.cpp
  bool progress(bool checksFaults);
  bool advancePeer(int rank);
  void finish(const PointToPointRef& op);
  void end(const PointToPointRef& op);
  void complete(const Finished& finished);
  void wake(int rank);
  bool active() const { return !all_.empty(); }
  /// Whether a thread must call progress(), because an operation is pending or a peer is unmet().
  bool restless() const { return active() || unmet_; }
  std::string describe(const PointToPointOp& op) const;

  // faults.cpp
  void checkFaults();
  std::string causeOfSilence(const PointToPointOp& op, TimePoint now);
  bool hasLeft(int rank, TimePoint now);
  /// Whether the group has failed, or is about to.
  bool failing() const { return failing_ || memory_.aborted(); }
  void fail(ErrorKind kind, const std::string& cause);
  void failWith(const std::exception_ptr& fault);
  /// Throws what a peer cannot have meant, unless it is broken.
  template <typename... Text>
  [[noreturn]] void throwBroken(int rank, const Text&... text) const {
    throw Error(ErrorKind::Backend, "internal error: ", memory_.memberName(rank), text...,
                kReportThis);
  }
  void noteLost(int rank, const std::string& text);

  // waiting.cpp
  std::optional<bool> waitHere(const PointToPointOp& op, TimePoint until);
  bool sleep(const PointToPointOp* op, std::chrono::nanoseconds most);
  void needBackground();
  void warnNoThread(const std::exception& error);
  void wakeBackground();
  void serveInBackground();

  // sending.cpp
  bool advanceSends(int rank);
  bool readAnswers(Peer& peer);
  bool begin(int rank, PointToPointOp& op);
  static RecordHead headOf(const PointToPointOp& op);
  static void noteBegun(Peer& peer, PointToPointOp& op);
  bool useLargeRing(int rank);
  std::size_t pieceBytes(const Peer& peer) const;
  bool writePieces(Peer& peer, PointToPointOp& op, std::size_t end, std::size_t& budget);
  std::uint64_t inArena(const Message& message) const;

  // receiving.cpp
  void post(const PointToPointRef& op);
  PointToPointRef takeReceive(int rank, int tag);
  bool matchUnexpected(const PointToPointRef& op);
  bool takeRecords(int rank);
  bool waitsForReceive(Peer& peer, const RecordHead& head);
  void takeMessage(int rank, const RecordHead& head, const RecordBytes& payload);
  void takePiece(int rank, const RecordHead& head, const RecordBytes& payload);
  void keep(Unexpected& message, const RecordBytes& payload, std::size_t length);
  void receive(const PointToPointRef& op, const Unexpected& message, const RecordBytes& payload);
  void store(PointToPointOp& op, const RecordBytes& payload);
  bool pull(Peer& peer);
  bool roomToAnswer(const Peer& peer) const;
  bool answer(Peer& peer);
  void hold(std::ptrdiff_t bytes);

  // remote.cpp
  bool advanceRemote(int rank);
  void sendRemote(Peer& peer, PointToPointOp& op);
  void receiveBody(PointToPointOp& op);
  void awaitBody(const PointToPointRef& op, TimePoint until, Lock& lock);
  bool read(int rank, TimePoint until, Lock& lock);
  void takeRemote(int rank);
  void serveNetwork();
  void serveBodies();
  template <typename Needed, typename Serve>
  bool startServing(bool& served, Needed needed, Serve serve);
  std::optional<bool> waitElsewhere(const PointToPointRef& op, TimePoint until);
  void waitOnNetwork(const PointToPointRef& op, TimePoint until, Lock& lock);
  bool isElsewhere(const PointToPointOp& op);
  /// Calls `use` without the lock, as a user of the peer's channel.
  template <typename Use>
  auto withoutLock(PeerConnection& remote, Lock& lock, Use use) {
    struct Relock {
      PeerConnection& remote;
      Lock& lock;
      ~Relock() {
        lock.lock();
        --remote.users;
      }
    };
    ++remote.users;
    lock.unlock();
    const Relock relock{remote, lock};
    return use();
  }

  // ending.cpp
  void flushRemote(TimePoint until);
  void leave(Lock& lock);
  void closeUnused(std::unique_lock<std::mutex>& lock);

  // connecting.cpp
  void needPeers();
  void findPeers(bool once);
  bool setPlace(int rank, Place place);
  void connectTo(int rank, const std::string& name);
  bool startJob(std::function<void()> job);

  GroupMemory& memory_;
  Rendezvous& rendezvous_;
  const Setup setup_;
  const std::size_t ringBytes_;

  std::mutex mutex_;
  std::vector<Peer> peers_;
  std::vector<char> mayBeBusy_;  // of each peer: whether it may be busy() or unmet()
  // For each hash of a tag: posted and unmatched receives in order, and messages in order of
  // arrival.
  std::array<std::unique_ptr<std::deque<PointToPointRef>>, kTagHashes> receives_;
  std::array<std::list<Unexpected>, kTagHashes> unexpected_;
  std::size_t anyReceives_ = 0;            // unmatched, from any source
  std::size_t held_ = 0;                   // bytes of their payloads
  bool full_ = false;                      // senders were notified to send less
  TimePoint nextTurn_ = TimePoint::max();  // when to call progress() though nothing wakes this rank
  std::list<PointToPointRef> all_;         // every operation that is not done, in order
  std::uint64_t turns_ = 0;                // calls of progress
  bool unmet_ = false;                     // at the last call of progress(), a peer was unmet()

  // What Lock::unlock() does.
  Finished finished_;           // to complete
  std::vector<int> checked_;    // peers that may have recorded a fault
  bool failing_ = false;        // failAll() must run
  bool failed_ = false;         // it has run since the last submit()
  std::optional<Fault> fault_;  // to record, unless another rank's fault came first
  bool findsHere_ = false;      // findPeers() must run, and no thread could be started for it
  std::mutex failMutex_;        // of failAll()
  bool published_ = false;      // a fault, to ranks that share no memory with this one
  bool failJob_ = false;        // poll() has left failAll() to a pooled thread

  std::atomic<int> waiters_{0};
  std::condition_variable background_;
  std::thread thread_;
  bool threadRuns_ = false;
  bool warned_ = false;        // that no thread could be started
  bool threadIdle_ = false;    // nothing is pending; wake it when something is
  bool threadSleeps_ = false;  // on the doorbell
  bool stopping_ = false;

  bool finds_ = false;  // findPeers() runs
  TimePoint nextFind_;  // when to try again, if no thread could be started for it
  std::atomic<bool> anyElsewhere_{false};
  int jobs_ = 0;  // pooled threads that run jobs of this object
  std::condition_variable changed_;
  std::atomic<int> sleepers_{0};  // threads that wait on `changed_`
};

}  // namespace fastcoll
