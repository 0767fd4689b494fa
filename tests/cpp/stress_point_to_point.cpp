// Point-to-point: random tags and sizes in both directions, any source, beside collectives, and
// senders that leave.
#include <algorithm>
#include <cstring>
#include <map>
#include <thread>
#include <tuple>

#include "stress_harness.hpp"

namespace stress {
namespace {

constexpr int kAnyTag = 99;

struct Letter {
  int from;
  int to;
  int tag;
  std::size_t bytes;
  std::uint64_t seed;
};

std::uint8_t byteOf(std::uint64_t seed, std::size_t i) {
  return static_cast<std::uint8_t>((seed >> 3) + i * 131 + (i >> 8) * 17);
}

class Transfer : public PointToPointOp {
 public:
  Transfer(const Letter& letter, bool sends, Milliseconds limit = Milliseconds(60000))
      : letter_(letter), buffer_(new std::uint8_t[std::max<std::size_t>(letter.bytes, 1)]) {
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
  /// Messages from any source have the sender's seed = its rank.
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
  std::unique_ptr<std::uint8_t[]> buffer_;
  std::exception_ptr fault_;
};
using TransferRef = std::shared_ptr<Transfer>;

std::size_t drawBytes(Random& random) {
  switch (drawBelow(random, 8)) {
    case 0:
      return 0;
    case 1:
      return PairChannel::kInlineBytes;
    case 2:
      return PairChannel::kInlineBytes + 1;
    case 3:
      return PairChannel::kDataBytes;
    case 4:
      return PairChannel::kDataBytes * 5 + drawBelow(random, 1000);
    default:
      return drawBelow(random, 5000);
  }
}

PointToPoint& pointToPoint(CpuEngine& engine) {
  REQUIRE(engine.pointToPointShared(Milliseconds(60000)));
  return engine.pointToPoint();
}

/// Letters known to all ranks; each posts its own sends and receives in an order of its own, but
/// those with one source, destination and tag in the order of the list.
std::vector<TransferRef> post(Rank& me, PointToPoint& p2p, const std::vector<Letter>& letters,
                              Random& own) {
  using Lane = std::tuple<bool, int, int>;
  std::map<Lane, std::vector<Letter>> lanes;
  for (const auto& letter : letters) {
    if (letter.from == me.rank) lanes[{true, letter.to, letter.tag}].push_back(letter);
    if (letter.to == me.rank) {
      lanes[{false, letter.tag == kAnyTag ? -1 : letter.from, letter.tag}].push_back(letter);
    }
  }
  std::vector<TransferRef> transfers;
  while (!lanes.empty()) {
    auto lane = std::next(lanes.begin(), static_cast<std::ptrdiff_t>(drawBelow(own, lanes.size())));
    transfers.push_back(std::make_shared<Transfer>(lane->second.front(), std::get<0>(lane->first)));
    p2p.submit(transfers.back());
    if (chance(own, 20)) loiter(own, 200);
    lane->second.erase(lane->second.begin());
    if (lane->second.empty()) lanes.erase(lane);
  }
  return transfers;
}

void collect(PointToPoint& p2p, std::vector<TransferRef> transfers, Random& own) {
  std::shuffle(transfers.begin(), transfers.end(), own);
  for (const auto& transfer : transfers) {
    while (chance(own, 4)) p2p.wait(*transfer, Clock::now() + Milliseconds(1));
    REQUIRE(p2p.wait(*transfer, TimePoint::max()));
    transfer->check();
  }
}

std::vector<Letter> drawLetters(Random& random, int ranks, int count) {
  std::vector<Letter> letters;
  for (int i = 0; i < count; ++i) {
    const auto n = static_cast<std::size_t>(ranks);
    Letter letter{};
    letter.from = static_cast<int>(drawBelow(random, n));
    letter.to = static_cast<int>(
        (static_cast<std::size_t>(letter.from) + 1 + drawBelow(random, n - 1)) % n);
    letter.tag = static_cast<int>(drawBelow(random, 4));
    letter.bytes = drawBytes(random);
    letter.seed = random();
    if (chance(random, 6)) {
      letter.tag = kAnyTag;
      letter.bytes = 3000;
      letter.seed = static_cast<std::uint64_t>(letter.from) * 1000;
    }
    letters.push_back(letter);
  }
  return letters;
}

void exchange(Rank& me) {
  Random shared(21);
  Random own(22u + static_cast<unsigned>(me.rank));
  for (int round = 0; round < 6 * effort; ++round) {
    GroupOptions options;
    options.spinMicros = round % 3 == 0 ? 0 : -1;
    const Engine engine = me.group(concat("exchange", round), options);
    const auto letters = drawLetters(shared, me.size, 40 * me.size);
    loiter(own, 3000);
    auto& p2p = pointToPoint(*engine);
    collect(p2p, post(me, p2p, letters, own), own);
    engine->shutdown();
  }
}

/// Two threads of a rank: one runs collectives, the other exchanges letters, on one group.
void besideCollectives(Rank& me) {
  for (int round = 0; round < 4 * effort; ++round) {
    Random shared(31u + static_cast<unsigned>(round));
    Random own(32u + static_cast<unsigned>(me.rank + round));
    const Engine engine = me.group(concat("beside", round));
    const auto letters = drawLetters(shared, me.size, 30 * me.size);
    std::exception_ptr problem;
    std::thread other([&] {
      try {
        Random plans(33);
        for (int i = 0; i < 60; ++i) runChecked(me, *engine, drawAny(plans, me.size, 3000));
      } catch (...) {
        problem = std::current_exception();
      }
    });
    try {
      loiter(own, 2000);
      auto& p2p = pointToPoint(*engine);
      collect(p2p, post(me, p2p, letters, own), own);
    } catch (...) {
      other.join();
      throw;
    }
    other.join();
    if (problem) std::rethrow_exception(problem);
    engine->shutdown();
  }
}

/// Several threads of a rank wait for letters of one group at once.
void manyWaiters(Rank& me) {
  const Engine engine = me.group("waiters");
  auto& p2p = pointToPoint(*engine);
  std::vector<std::thread> threads;
  std::vector<std::exception_ptr> problems(3);
  for (int t = 0; t < 3; ++t) {
    threads.emplace_back([&, t] {
      try {
        for (int i = 0; i < 60 * effort; ++i) {
          const int next = (me.rank + 1) % me.size;
          const int before = (me.rank + me.size - 1) % me.size;
          const std::size_t bytes = i % 5 == 0 ? 70000 : 100;
          const std::uint64_t seed = static_cast<std::uint64_t>(i) * 64;
          auto out = std::make_shared<Transfer>(Letter{me.rank, next, t, bytes, seed}, true);
          auto in = std::make_shared<Transfer>(Letter{before, me.rank, t, bytes, seed}, false);
          p2p.submit(out);
          p2p.submit(in);
          p2p.wait(*in, TimePoint::max());
          p2p.wait(*out, TimePoint::max());
          in->check();
          out->check();
        }
      } catch (...) {
        problems[static_cast<std::size_t>(t)] = std::current_exception();
        engine->abort(ErrorKind::Backend, "the test failed");
      }
    });
  }
  for (auto& thread : threads) thread.join();
  for (const auto& problem : problems) {
    if (problem) std::rethrow_exception(problem);
  }
}

/// A sender whose sends have ended leaves at once: its receiver still gets everything.
void senderLeaves(Rank& me) {
  Random shared(41);
  Random own(42u + static_cast<unsigned>(me.rank));
  for (int round = 0; round < 60 * effort; ++round) {
    const Engine engine = me.group(concat("leaves", round));
    const std::size_t sizes[] = {100, 2049, 65536, 200000, 262144};
    std::vector<Letter> letters;
    for (std::size_t i = 0, n = 1 + drawBelow(shared, 3); i < n; ++i) {
      letters.push_back({0, 1, 0, sizes[drawBelow(shared, 5)], shared()});
    }
    auto& p2p = pointToPoint(*engine);
    // Both must have met, or the receiver may never find the sender.
    auto hello = std::make_shared<Transfer>(Letter{1, 0, 7, 8, 3}, me.rank == 1);
    auto back = std::make_shared<Transfer>(Letter{0, 1, 7, 8, 3}, me.rank == 0);
    p2p.submit(hello);
    p2p.submit(back);
    REQUIRE(p2p.wait(*hello, TimePoint::max()) && p2p.wait(*back, TimePoint::max()));
    if (me.rank == 1) loiter(own, 3000);
    auto transfers = post(me, p2p, letters, own);
    for (const auto& transfer : transfers) {
      p2p.wait(*transfer, TimePoint::max());
      transfer->check();
    }
    engine->shutdown();
  }
}

/// Letters are under way when somebody aborts: each has ended well with the right bytes, or failed.
void abortStorm(Rank& me) {
  for (int round = 0; round < 25 * effort; ++round) {
    Random shared(51u + static_cast<unsigned>(round));
    Random own(52u + static_cast<unsigned>(me.rank * 1000 + round));
    const Engine engine = me.group(concat("p2pstorm", round));
    const auto letters = drawLetters(shared, me.size, 20 * me.size);
    const int culprit = static_cast<int>(drawBelow(shared, static_cast<std::size_t>(me.size)));
    const std::size_t after = drawBelow(shared, 3000);
    auto& p2p = pointToPoint(*engine);
    // A rank that has met nobody when it aborts can tell nobody.
    runChecked(me, *engine, Plan{});
    me.sync();
    std::thread killer;
    if (me.rank == culprit) {
      killer = std::thread([&engine, after] {
        std::this_thread::sleep_for(std::chrono::microseconds(after));
        engine->abort(ErrorKind::Backend, "the storm");
      });
    }
    std::exception_ptr problem;
    try {
      const auto transfers = post(me, p2p, letters, own);
      for (const auto& transfer : transfers) {
        REQUIRE(p2p.wait(*transfer, Clock::now() + Milliseconds(20000)), "a letter never ended");
        if (!transfer->fault()) transfer->verify();
      }
    } catch (...) {
      problem = std::current_exception();
    }
    if (killer.joinable()) killer.join();
    if (problem) std::rethrow_exception(problem);
    if (chance(own, 2)) engine->shutdown();
  }
}

void lateReceiver(Rank& me) {
  // A receiver that does not come: the sender's time is up, and both learn it.
  const Engine engine = me.group("late");
  auto& p2p = pointToPoint(*engine);
  if (me.rank == 0) {
    const auto big =
        std::make_shared<Transfer>(Letter{0, 1, 0, 100000, 1}, true, Milliseconds(300));
    requireFault({"Timed out after 300 ms"}, Milliseconds(1500), [&] {
      p2p.submit(big);
      p2p.wait(*big, TimePoint::max());
      big->check();
    });
  }
  me.sync();
  if (me.rank == 1) {
    const auto in =
        std::make_shared<Transfer>(Letter{0, 1, 0, 100000, 1}, false, Milliseconds(300));
    requireFault({"Timed out after 300 ms"}, Milliseconds(1500), [&] {
      p2p.submit(in);
      p2p.wait(*in, TimePoint::max());
      in->check();
    });
  }
}

}  // namespace

std::vector<Test> pointToPointTests() {
  return {{"exchange", exchange, {2, 3, 5}},
          {"beside collectives", besideCollectives, {2, 4}},
          {"many waiters", manyWaiters, {2, 3}},
          {"sender leaves", senderLeaves, {2}},
          {"point-to-point abort storm", abortStorm, {2, 4}},
          {"late receiver", lateReceiver, {2}}};
}

}  // namespace stress
