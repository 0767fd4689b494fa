// Long messages of an exchange between hosts: each goes from its rank to its rank, over a
// connection of the two and from memory to memory, past the leaders, which would copy it three
// times more.
//
// A message goes only to a receive of its own length (less multiples of 2^30 - 2), so that ranks
// that disagree send each other nothing that the other has no room for; leaders compare what their
// ranks say, and nobody reports what has come before they have. Where the ranks are connected,
// messages are begun first, and go beside what the leaders do. The first time they are connected
// behind it: then both take part, and agree.
#pragma once

#include <cstdint>
#include <vector>

#include "../algorithms/algorithm.hpp"
#include "../network/connection.hpp"

namespace fastcoll {

/// A rank's connections to ranks of other hosts. They are point-to-point's, which lends them to the
/// collective that runs.
class PeerConnections {
 public:
  virtual ~PeerConnections() = default;
  /// Whether there is a connection to the rank, which is lent then; else one is made, as soon as
  /// the rank asks for it too. Throws what prevents it.
  virtual bool borrow(int rank) = 0;
  /// Waits for that, until `until` at most.
  virtual void awaitConnection(TimePoint until) = 0;
  /// As those of Connection, of a lent one; matched among themselves, by length.
  virtual TransferRef sendTo(int rank, const void* data, std::size_t bytes) = 0;
  virtual TransferRef receiveFrom(int rank, void* data, std::size_t bytes) = 0;
  /// Ends all lending. When the group has failed, nobody touches a transfer's memory afterwards.
  virtual void giveBack() noexcept = 0;
};

struct Spanning;

class LongMessages {
 public:
  /// So long that it is worth the network's time for a message of its own.
  static bool areLong(std::size_t bytes);

  LongMessages(Spanning& spanning, const Request& request);

  /// To be called for all messages before anything else.
  void send(int to, const Message& message) {
    pending_.push_back({to, true, &message, nullptr, {}});
  }
  void receive(int from, const Message& message) {
    pending_.push_back({from, false, &message, nullptr, {}});
  }
  /// Begins the messages whose ranks are connected.
  void begin();
  /// Connects the others, begins theirs, and waits for all.
  void finish();

 private:
  struct Pending {
    int rank;
    bool sends;
    const Message* message;
    std::uint8_t* copy;  // of one that lies in pieces
    TransferRef transfer;
  };

  void beginOne(Pending& one);
  void wait(Pending& one);
  void checkTime(const Pending& one);
  template <typename Call>
  auto lost(int rank, Call call) const;

  Spanning& spanning_;
  const Request& request_;
  PeerConnections* connections_ = nullptr;
  std::vector<Pending> pending_;
  TimePoint began_;  // to wait
};

}  // namespace fastcoll
