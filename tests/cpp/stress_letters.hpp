// Shared by the point-to-point tests: letters, and transfers that check the received data.
#pragma once

#include <cstring>
#include <memory>
#include <vector>

#include "stress_harness.hpp"

namespace stress {

constexpr int kAnyTag = 99;

struct Letter {
  int from;
  int to;
  int tag;
  std::size_t bytes;
  std::uint64_t seed;
};

inline std::uint8_t byteOf(std::uint64_t seed, std::size_t i) {
  return static_cast<std::uint8_t>((seed >> 3) + i * 131 + (i >> 8) * 17);
}

/// Bytes on the heap, or in an arena.
class Bytes {
 public:
  Bytes(std::size_t bytes, std::shared_ptr<Arena> arena) : arena_(std::move(arena)) {
    if (arena_ == nullptr) {
      heap_.reset(new std::uint8_t[std::max<std::size_t>(bytes, 1)]);
    } else {
      offset_ = arena_->allocate(bytes);
    }
  }
  ~Bytes() {
    if (arena_ != nullptr) arena_->release(offset_);
  }
  Bytes(const Bytes&) = delete;
  Bytes& operator=(const Bytes&) = delete;
  std::uint8_t* get() const { return arena_ == nullptr ? heap_.get() : arena_->base() + offset_; }
  std::uint8_t& operator[](std::size_t i) const { return get()[i]; }

 private:
  std::shared_ptr<Arena> arena_;
  std::uint64_t offset_ = 0;
  std::unique_ptr<std::uint8_t[]> heap_;
};

class Transfer : public PointToPointOp {
 public:
  Transfer(const Letter& letter, bool sends, Milliseconds limit = Milliseconds(60000),
           std::shared_ptr<Arena> arena = nullptr)
      : letter_(letter), buffer_(letter.bytes, std::move(arena)) {
    send = sends;
    peer = sends ? letter.to : (letter.tag == kAnyTag ? kAnySource : letter.from);
    tag = letter.tag;
    message = Message(buffer_.get(), letter.bytes);
    timeout = limit;
    deadline = deadlineAfter(Clock::now(), limit);
    for (std::size_t i = 0; i < letter.bytes; ++i) {
      buffer_[i] = sends ? byteOf(letter.seed, i) : std::uint8_t{0xa5};
    }
  }
  void complete(std::exception_ptr fault) noexcept override { fault_ = fault; }
  void check() const {
    if (fault_) std::rethrow_exception(fault_);
    verify();
  }
  std::exception_ptr fault() const { return fault_; }
  void spoil() { std::memset(buffer_.get(), 0xee, letter_.bytes); }
  /// In messages from any source, the seed is the sender's rank times 1000.
  void verify() const {
    if (send) return;
    const std::uint64_t seed =
        tag == kAnyTag ? static_cast<std::uint64_t>(source) * 1000 : letter_.seed;
    for (std::size_t i = 0; i < letter_.bytes; ++i) {
      REQUIRE(buffer_[i] == byteOf(seed, i), "WRONG DATA: ", letter_.from, " -> ", letter_.to,
              ", tag ", tag, ", byte ", i, " of ", letter_.bytes);
    }
  }

 private:
  const Letter letter_;
  const Bytes buffer_;
  std::exception_ptr fault_;
};
using TransferRef = std::shared_ptr<Transfer>;

/// Begins to send a letter, or to receive it.
inline TransferRef begin(PointToPoint& p2p, const Letter& letter, bool sends,
                         std::shared_ptr<Arena> arena = nullptr) {
  auto transfer = std::make_shared<Transfer>(letter, sends, Milliseconds(60000), std::move(arena));
  p2p.submit(transfer);
  return transfer;
}

/// Letters between random ranks, with sizes at the edges of each path of a message.
std::vector<Letter> drawLetters(Random& random, int ranks, int count);

PointToPoint& pointToPoint(CpuEngine& engine);
/// The arena of this process, made if the engine has not needed it yet.
std::shared_ptr<Arena> arenaOf(CpuEngine& engine);

/// `letters` is equal on all ranks. Each rank posts its own sends and receives in a random order;
/// those with the same source, destination and tag keep the order of the list.
/// `arena`: memory for some of the messages.
std::vector<TransferRef> post(Rank& me, PointToPoint& p2p, const std::vector<Letter>& letters,
                              Random& own, const std::shared_ptr<Arena>& arena = nullptr);

std::vector<Test> pointToPointFaultTests();

/// One test of both channels: between ranks of one host, and of simulated hosts.
template <typename Body>
auto here(Body test) {
  return [test](Rank& me) { test(me, GroupOptions{}); };
}
template <typename Body>
auto apart(Body test, const char* placement) {
  return [test, placement](Rank& me) { test(me, onHosts(placement, me)); };
}

}  // namespace stress
