// What a host's leader says to the other leaders: one frame each way at the head of a collective,
// with the collective's signature and the data if they are few, and data behind it.
//
// The receives of the next three frames are posted before they are needed, so that a small
// collective takes one way over the network, and who has given all that it had may leave: of two
// leaders one is ahead by so many frames at most. Who only gives another host data does not wait
// for that host's frame: it is compared when a frame of that host is next waited for.
//
// Data too long for a frame follows it at once. Nobody uses what has come before the frame has been
// compared; and a message goes only to a receive of its own length, so that leaders that disagree
// send each other nothing that the other has no room for.
#pragma once

#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "../algorithms/algorithm.hpp"
#include "../group/hosts.hpp"
#include "../network/connection.hpp"
#include "../transport/group_memory.hpp"

namespace fastcoll {

/// The host's leader has said goodbye.
struct PeerLeft : ConnectionLost {
  using ConnectionLost::ConnectionLost;
};

/// Of a connection that broke and whose other end has not said goodbye: the reason is not known.
inline bool isUnexplained(const Error& error) {
  return dynamic_cast<const ConnectionLost*>(&error) != nullptr &&
         dynamic_cast<const PeerLeft*>(&error) == nullptr;
}

class Links {
 public:
  /// Most bytes of data in a frame.
  static constexpr std::size_t kInlineBytes = 64 * 1024;

  /// Called now and then while a wait lasts; throws when the group has failed elsewhere.
  using CheckPeers = std::function<void(const std::string& prefix)>;

  /// Connects this leader with all others, which do the same. `id` is that of the agreement.
  Links(std::shared_ptr<Network> network, const Hosts& hosts, GroupMemory& memory,
        const std::string& id, Milliseconds timeout, Milliseconds grace, CheckPeers checkPeers);
  /// Says goodbye, so that what is under way arrives, and closes.
  ~Links();

  /// Starts a collective; `prefix` begins its error messages.
  void begin(const Request& request, std::string prefix);
  /// The data of this host's frame to `host`: room for kInlineBytes, and for what all-to-all tells
  /// of sizes.
  std::uint8_t* frame(int host);
  /// Sends frames to the hosts, with `bytes(host)` of data each.
  template <typename Bytes>
  void sendFrames(const std::vector<int>& hosts, Bytes bytes) {
    for (int host : hosts) sendFrame(host, bytes(host));
  }
  /// Waits for the frames of the hosts; throws unless all run this collective.
  void awaitFrames(const std::vector<int>& hosts) {
    for (int host : hosts) awaitFrame(host);
  }
  /// Sends frames to hosts that have no data for this one in this collective: they answer().
  template <typename Bytes>
  void give(const std::vector<int>& hosts, Bytes bytes) {
    for (int host : hosts) sendFrame(host, bytes(host));
    for (int host : hosts) compareLater(host);
  }
  /// Tells a host that has given this one its data, or does, that this one takes part.
  void answer(int host);
  /// Data of the host's frame, of which there must be `bytes`. Valid until the next collective.
  const std::uint8_t* frameOf(int host, std::size_t bytes) const;
  /// How many there are.
  std::size_t frameBytes(int host) const;

  /// Throws: of what `from` sends to `to` the two say different sizes.
  [[noreturn]] void disagree(int from, int to, std::uint64_t sent, std::uint64_t expected) const;

  /// Data of one lane and length is received in the order in which it was sent: a collective's
  /// steps, which overtake each other, have a lane each. No receive of another length takes it.
  enum Lane { kFirstStep = 1, kSecondStep = 2 };
  TransferRef send(int host, const void* data, std::size_t bytes, Lane lane = kFirstStep);
  TransferRef receive(int host, void* data, std::size_t bytes, Lane lane = kFirstStep);
  /// Waits until a transfer with the host has ended.
  void wait(int host, TransferRef& transfer);
  /// Throws PeerLeft if the host's leader has said goodbye, or is about to.
  void throwIfLeft(int host);
  /// To be called now and then while another wait lasts, which has begun then: throws when the
  /// group has failed, or a host that is not waited for runs another collective.
  void check(TimePoint began);

  /// The other hosts, beginning with the one behind this, so that not all send to one at once.
  const std::vector<int>& others() const { return others_; }
  /// The other hosts that this one has to do with where all data comes from the root's host, or
  /// goes there.
  std::vector<int> around(int rootHost) const {
    return rootHost == hosts_.here() ? others_ : std::vector<int>{rootHost};
  }
  /// Breaks all connections. By the thread that runs collectives, or when none does.
  void close() noexcept;

 private:
  struct Head {
    Arrival arrival, before;  // of this collective and the one before it
    std::uint64_t call;       // how many have begun: a call of torch's may be several
    std::uint64_t bytes;      // of data behind it
    std::uint64_t goodbye;
  };
  using Buffer = std::unique_ptr<std::uint8_t[]>;
  /// What a frame is compared with.
  struct Signature {
    Arrival arrival;
    std::uint64_t expected;  // elements that the other leader must announce
    std::uint64_t call;
  };
  static constexpr std::size_t kAhead = 3;  // receives that are posted before they are needed
  struct Link {
    Buffer out, in[kAhead + 1];
    Head goodbye{{}, {}, 0, 0, 1};
    std::unique_ptr<Connection> connection;  // closed before its memory goes
    TransferRef sending, leaving;
    std::deque<TransferRef> coming;  // to the buffers behind the present one, in a circle
    std::size_t present = 0;         // of `in`: the last frame that was waited for
    std::optional<Signature> later;  // what the first of `coming` is yet to be compared with
    std::string gone;                // why there are fewer receives than kAhead
  };

  void sendFrame(int host, std::size_t bytes);
  void awaitFrame(int host);
  void compareLater(int host);
  void compareNext(int host);
  void compare(int host, const Signature& mine, const Head& head) const;
  void settle(int host);
  void farewell(Link& link, TimePoint until);
  [[noreturn]] void throwLeft(int host) const;
  void post(Link& link);
  Head headAt(const Link& link, std::size_t ahead = 0) const;
  [[noreturn]] void mismatch(int host, const Arrival& mine, const Arrival& theirs) const;
  void lookAt(int host);
  [[noreturn]] void late(int host) const;
  Link& link(int host) { return links_[host]; }
  const Link& link(int host) const { return links_[host]; }
  template <typename Call>
  auto lost(int host, Call call);

  const Hosts& hosts_;
  GroupMemory& memory_;
  const std::size_t room_;  // bytes of data in a frame
  std::vector<int> others_;
  std::shared_ptr<Network> network_;
  std::vector<Link> links_;
  const Request* request_ = nullptr;  // of the present collective
  Arrival arrival_{}, before_{};
  std::uint64_t call_ = 0;
  std::size_t looked_ = 0;  // the other host that lookAt() was asked for last
  std::string prefix_;
  TimePoint deadline_;
  Milliseconds timeout_{};
  const CheckPeers checkPeers_;
  const Milliseconds grace_;  // for another host to say what keeps it, when time is up
};

}  // namespace fastcoll
