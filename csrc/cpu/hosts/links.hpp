// The connections of a host's leader to the other leaders. A collective begins with one frame in
// each direction: its signature, and its data if that is short. Longer data follows.
//
// The receives of the next three frames are posted in advance. So a small collective costs one
// network trip, and a leader that has sent all its data may leave. A leader may run at most three
// collectives ahead of another. A leader that only sends data to a host does not wait for that
// host's frame. It compares that frame when it next waits for one of that host.
//
// Data too long for a frame follows it at once. No rank uses data before the frame has been
// compared. A message goes only to a receive of its own length. So leaders that disagree never send
// each other data without room for it.
#pragma once

#include <cstdint>
#include <deque>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "cpu/algorithms/algorithm.hpp"
#include "group/group_faults.hpp"
#include "group/hosts.hpp"
#include "network/connection.hpp"
#include "shm/group_memory.hpp"
#include "trace/trace.hpp"

namespace fastcoll {

/// Begins the list of late ranks of other hosts.
inline constexpr std::string_view kUnreachable = "not arrived, or not reachable over the network: ";

/// The host's leader has sent its close notice.
struct PeerLeft : ConnectionLost {
  using ConnectionLost::ConnectionLost;
};

/// Whether a connection broke without a close notice from its other end: the reason is not known.
inline bool isUnexplained(const Error& error) {
  return dynamic_cast<const ConnectionLost*>(&error) != nullptr &&
         dynamic_cast<const PeerLeft*>(&error) == nullptr;
}

class Links {
 public:
  /// Most bytes of data in a frame.
  static constexpr std::size_t kInlineBytes = 64 * 1024;

  /// Connects this leader with all others, which do the same. `id` is that of the agreement.
  Links(std::shared_ptr<Network> network, const Hosts& hosts, GroupMemory& memory,
        const std::string& id, Milliseconds timeout, Milliseconds grace, GroupFaults& faults);
  /// Sends close notices, waits until data in flight has arrived, and closes.
  ~Links();

  /// Starts a collective; `site`: of its errors. `call`: its record in the trace.
  void begin(const Request& request, ErrorSite site, trace::RecordId call);
  /// The data of this host's frame to `host`: room for kInlineBytes, or for the sizes of an
  /// all-to-all.
  std::uint8_t* frame(int host);
  /// Which way data goes between this host and others. Frames go both ways in any case. A host
  /// that only sends data does not wait for the others' frames now, but compares them later.
  enum class Flow { Both, Out, In };
  /// Sends frames to the hosts, with `bytes(host)` of data each, or none if data only comes in.
  template <typename Bytes>
  void sendFrames(const std::vector<int>& hosts, Flow flow, Bytes bytes) {
    for (int host : hosts) {
      if (flow == Flow::In) {
        acknowledge(host);
      } else {
        sendFrame(host, bytes(host));
      }
    }
    if (flow != Flow::Out) return;
    for (int host : hosts) compareLater(host);
  }
  /// Waits for the frames of the hosts, if data comes in. Throws unless all run this collective.
  void awaitFrames(const std::vector<int>& hosts, Flow flow) {
    if (flow == Flow::Out) return;
    for (int host : hosts) {
      compareLater(host);
      compareNext(host);
    }
  }
  /// Data of the host's frame, which must have `bytes`. Valid until the next collective.
  const std::uint8_t* frameOf(int host, std::size_t bytes) const;
  /// Bytes of data in the host's frame.
  std::size_t frameBytes(int host) const;

  /// Throws: ranks `from` and `to` report different sizes for what `from` sends to `to`.
  [[noreturn]] void disagree(int from, int to, std::uint64_t sent, std::uint64_t expected) const;

  /// Data of one tag and length is received in the order in which it was sent. A collective's steps
  /// can overtake each other, so each has a tag of its own. No receive of another length takes it.
  enum StepTag { kFirstStep = 1, kSecondStep = 2 };
  TransferRef send(int host, const void* data, std::size_t bytes, StepTag step = kFirstStep);
  TransferRef receive(int host, void* data, std::size_t bytes, StepTag step = kFirstStep);
  /// Waits until a transfer with the host has ended.
  void wait(int host, TransferRef& transfer);
  /// Throws PeerLeft if the host's leader has sent its close notice, or is about to.
  void throwIfLeft(int host);
  /// Call periodically during another wait, which began at `began`. Throws if the group has failed,
  /// or another host runs a different collective.
  void check(TimePoint began);

  /// The other hosts, beginning with the next one, so that not all hosts send to one at once.
  const std::vector<int>& others() const { return others_; }
  /// The other hosts that this one exchanges data with if all data comes from, or goes to, the
  /// root's host.
  std::vector<int> around(int rootHost) const {
    return rootHost == hosts_.here() ? others_ : std::vector<int>{rootHost};
  }
  /// Closes all connections. Call from the thread that runs collectives, or when none does.
  void close() noexcept;

 private:
  struct Head {
    Signature signature;
    std::uint64_t call;   // collectives begun; a call of torch's may be several
    std::uint64_t bytes;  // of data after the head
    std::uint64_t closeNotice;
  };
  using Buffer = std::unique_ptr<std::uint8_t[]>;
  /// What a frame is compared with.
  struct Announced {
    Signature signature;
    std::uint64_t expected;  // elements that the other leader must announce
    std::uint64_t call;
    Signature before;  // the collective before
  };
  static constexpr std::size_t kAhead = 3;  // receives that are posted before they are needed
  struct Link {
    Buffer out, in[kAhead + 1];
    Head closeNotice{{}, 0, 0, 1};
    std::unique_ptr<Connection> connection;  // closed before its memory is freed
    TransferRef sending, leaving;
    std::deque<TransferRef> coming;  // receives to the buffers after the present one, in a circle
    std::size_t present = 0;         // index in `in` of the frame that was awaited last
    std::optional<Announced> later;  // what to compare the first of `coming` with
    std::string lostBecause;         // why there are fewer receives than kAhead
    trace::HostWaits* waits = nullptr;
  };

  void sendFrame(int host, std::size_t bytes);
  void acknowledge(int host);
  void compareLater(int host);
  void compareNext(int host);
  void compare(int host, const Announced& mine, const Head& head) const;
  void settle(int host);
  template <typename Use>
  void visitArrived(Link& peer, TimePoint until, Use use);
  [[noreturn]] void throwLeft(int host) const;
  void post(Link& link);
  Head headAt(const Link& link, std::size_t ahead = 0) const;
  void compareArrived(int host);
  [[noreturn]] void late(int host) const;
  template <typename Call>
  auto lost(int host, Call call);

  const Hosts& hosts_;
  GroupMemory& memory_;
  const std::size_t room_;  // bytes of data in a frame
  std::vector<int> others_;
  std::shared_ptr<Network> network_;
  std::vector<Link> links_;
  const Request* request_ = nullptr;  // of the present collective
  Signature signature_{};
  Signature before_{};  // of the collective before
  std::uint64_t call_ = 0;
  bool counts_ = false;       // the links have their counters of waits
  std::size_t compared_ = 0;  // index of the other host that compareArrived() checked last
  ErrorSite site_;
  TimePoint deadline_;
  Milliseconds timeout_{};
  GroupFaults& faults_;
  const Milliseconds grace_;  // for another host to report its late rank, after the deadline
};

}  // namespace fastcoll
