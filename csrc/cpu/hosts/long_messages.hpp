// Long messages of an exchange between hosts. Each goes from its sender to its receiver, over a
// connection of the two and from memory to memory. It bypasses the leaders, which would copy it
// three times more.
//
// A message goes only to a receive of its own length (modulo 2^30 - 2). So ranks that disagree
// never send each other data without room for it. Leaders compare the sizes of their ranks, and no
// rank reports success before that. If the ranks are connected, messages begin first and overlap
// the leaders' exchange. The first time, the ranks connect after it, because then both take part,
// and agree.
#pragma once

#include <cstdint>
#include <vector>

#include "cpu/algorithms/algorithm.hpp"
#include "network/connection.hpp"

namespace fastcoll {

struct MultiHost;
class PointToPoint;

class LongMessages {
 public:
  /// Whether a message is so long that a network transfer of its own is worth its time.
  static bool areLong(std::size_t bytes) { return bytes > kShort; }

  LongMessages(MultiHost& multiHost, const Request& request)
      : multiHost_(multiHost), request_(request) {}

  /// Call for all messages before anything else.
  void send(int to, const Message& message) {
    pending_.push_back({to, true, &message, nullptr, {}});
  }
  void receive(int from, const Message& message) {
    pending_.push_back({from, false, &message, nullptr, {}});
  }
  /// Begins the messages whose ranks are connected.
  void begin();
  /// Connects the other ranks, begins their messages, and waits for all.
  void finish();

 private:
  static constexpr std::size_t kShort = 32 * 1024;
  struct Pending {
    int rank;
    bool sends;
    const Message* message;
    std::uint8_t* copy;  // of a message that is not contiguous
    TransferRef transfer;
  };

  void checkTime(const Pending& one);
  template <typename Call>
  auto lost(int rank, Call call) const;

  MultiHost& multiHost_;
  const Request& request_;
  std::vector<Pending> pending_;
  TimePoint began_;  // when finish() began to wait
};

}  // namespace fastcoll
