// Point-to-point: random tags and sizes in both directions, any source, messages in the arena,
// beside collectives.
#include <algorithm>
#include <thread>

#include "stress_letters.hpp"

namespace stress {
namespace {

void collect(PointToPoint& p2p, std::vector<TransferRef> transfers, Random& own) {
  std::shuffle(transfers.begin(), transfers.end(), own);
  for (const auto& transfer : transfers) {
    while (chance(own, 4)) p2p.wait(transfer, Clock::now() + Milliseconds(1));
    REQUIRE(p2p.wait(transfer, TimePoint::max()));
    transfer->check();
  }
}

void exchange(Rank& me, GroupOptions options) {
  Random shared(21);
  Random own(22u + static_cast<unsigned>(me.rank));
  for (int round = 0; round < 6 * effort; ++round) {
    options.spinMicros = round % 3 == 0 ? 0 : -1;
    const Engine engine = me.group(concat("exchange", round), options);
    const auto letters = drawLetters(shared, me.size, 40 * me.size);
    loiter(own, 3000);
    auto& p2p = pointToPoint(*engine);
    const auto arena = round % 2 == 0 ? arenaOf(*engine) : nullptr;
    collect(p2p, post(me, p2p, letters, own, arena), own);
    engine->shutdown();
  }
}

/// Every size at an edge, in both directions at once, with the receive before or after its message.
/// Small messages in between let the ring end anywhere.
void edges(Rank& me, const GroupOptions& options) {
  const Engine engine = me.group("edges", options);
  auto& p2p = pointToPoint(*engine);
  Random shared(61);
  Random own(62u + static_cast<unsigned>(me.rank));
  std::vector<std::size_t> sizes;
  for (const std::size_t edge :
       {PairRecord::kInlineBytes, PairRecord::kLine, PairChannel::kSmallBytes, PairCells::kBytes,
        4 * PairCells::kBytes, PointToPoint::kEagerBytes, PointToPoint::kRingBytes / 2,
        PointToPoint::kRingBytes, 3 * PointToPoint::kRingBytes}) {
    sizes.insert(sizes.end(), {edge - 1, edge, edge + 1});
  }
  std::shuffle(sizes.begin(), sizes.end(), shared);
  const auto arena = arenaOf(*engine);
  for (const std::size_t bytes : sizes) {
    const std::uint64_t seed = shared();
    const std::size_t odd = drawBelow(shared, 3000);
    for (const bool inArena : {false, true}) {
      std::vector<TransferRef> transfers;
      const auto place = inArena ? arena : nullptr;
      for (const bool sends : {me.rank == 0, me.rank != 0}) {
        if (sends != (me.rank == 0)) loiter(own, 300);
        const int from = sends ? me.rank : 1 - me.rank;
        const Letter big{from, 1 - from, 0, bytes, seed + static_cast<std::uint64_t>(from) * 8};
        const Letter small{from, 1 - from, 1, odd, seed};
        for (const Letter& letter : {big, small}) {
          transfers.push_back(begin(p2p, letter, sends, place));
        }
      }
      collect(p2p, transfers, own);
    }
  }
}

/// So many messages without a receive that senders must keep them.
void flood(Rank& me, const GroupOptions& options) {
  const Engine engine = me.group("flood", options);
  auto& p2p = pointToPoint(*engine);
  for (int round = 0; round < 2; ++round) {
    std::vector<TransferRef> transfers;
    const int count = 150;
    for (int i = 0; i < count; ++i) {
      const int tag = 200 + (me.rank == 0 ? i : count - 1 - i);
      const Letter letter{0, 1, tag, 200000u + static_cast<unsigned>(tag),
                          static_cast<std::uint64_t>(tag) * 64};
      transfers.push_back(std::make_shared<Transfer>(letter, me.rank == 0));
    }
    for (const auto& transfer : transfers) {
      p2p.submit(transfer);
      if (me.rank == 1) REQUIRE(p2p.wait(transfer, TimePoint::max()));
    }
    for (const auto& transfer : transfers) {
      REQUIRE(p2p.wait(transfer, TimePoint::max()));
      transfer->check();
    }
  }
}

/// No thread waits: the background thread transfers messages that are too large to be eager.
void unattended(Rank& me, const GroupOptions& options) {
  const Engine engine = me.group("unattended", options);
  auto& p2p = pointToPoint(*engine);
  for (const bool inArena : {false, true}) {
    for (int i = 0; i < 4; ++i) {
      const auto transfer =
          begin(p2p, {0, 1, 0, 3000000, 5}, me.rank == 0, inArena ? arenaOf(*engine) : nullptr);
      const auto end = Clock::now() + Milliseconds(10000);
      while (!transfer->done.load()) {
        REQUIRE(Clock::now() < end, "nobody made progress");
        std::this_thread::sleep_for(Milliseconds(1));
      }
      transfer->check();
    }
  }
}

/// Two threads of a rank: one runs collectives, the other exchanges letters, on one group.
void besideCollectives(Rank& me, const GroupOptions& options) {
  for (int round = 0; round < often(4); ++round) {
    Random shared(31u + static_cast<unsigned>(round));
    Random own(32u + static_cast<unsigned>(me.rank + round));
    const Engine engine = me.group(concat("beside", round), options);
    const auto letters = drawLetters(shared, me.size, 30 * me.size);
    together(2, [&](int thread) {
      if (thread == 0) {
        Random plans(33);
        for (int i = 0; i < 60; ++i) runChecked(me, *engine, drawAny(plans, me.size, 3000));
      } else {
        loiter(own, 2000);
        auto& p2p = pointToPoint(*engine);
        collect(p2p, post(me, p2p, letters, own), own);
      }
    });
    engine->shutdown();
  }
}

/// Several threads of a rank wait for letters of one group at the same time.
void manyWaiters(Rank& me, const GroupOptions& options) {
  const Engine engine = me.group("waiters", options);
  auto& p2p = pointToPoint(*engine);
  together(3, [&](int t) {
    try {
      for (int i = 0; i < often(60); ++i) {
        const int next = (me.rank + 1) % me.size;
        const int before = (me.rank + me.size - 1) % me.size;
        const std::size_t bytes = i % 5 == 0 ? 70000 : 100;
        const std::uint64_t seed = static_cast<std::uint64_t>(i) * 64;
        const auto out = begin(p2p, {me.rank, next, t, bytes, seed}, true);
        const auto in = begin(p2p, {before, me.rank, t, bytes, seed}, false);
        p2p.wait(in, TimePoint::max());
        p2p.wait(out, TimePoint::max());
        in->check();
        out->check();
      }
    } catch (...) {
      engine->abort(ErrorKind::Backend, "the test failed");
      throw;
    }
  });
}

/// The sizes at the edges between hosts.
void remoteEdges(Rank& me, const GroupOptions& options) {
  const Engine engine = me.group("remote edges", options);
  auto& p2p = pointToPoint(*engine);
  Random own(71u + static_cast<unsigned>(me.rank));
  for (const std::size_t edge : {std::size_t{1}, PointToPoint::kRecordBytesWhenFull,
                                 PointToPoint::kRecordBytes, std::size_t{1} << 20}) {
    for (const std::size_t bytes : {edge - 1, edge, edge + 1}) {
      std::vector<TransferRef> transfers;
      for (int i = 0; i < 3; ++i) {
        for (const bool sends : {me.rank == 0, me.rank != 0}) {
          const int from = sends ? me.rank : 1 - me.rank;
          const auto seed = static_cast<std::uint64_t>(bytes) * 64 + static_cast<unsigned>(i);
          const int tag = bytes % 2 == 0 ? i : 2 - i;
          transfers.push_back(begin(p2p, {from, 1 - from, tag, bytes, seed}, sends));
          if (i == 1) loiter(own, 300);
        }
      }
      collect(p2p, transfers, own);
    }
  }
}

}  // namespace

std::vector<Test> pointToPointTests() {
  std::vector<Test> tests = {
      {"exchange", here(exchange), {2, 3, 5}},
      {"edges", here(edges), {2}},
      {"flood", here(flood), {2}},
      {"unattended messages", here(unattended), {2}},
      {"beside collectives", here(besideCollectives), {2, 4}},
      {"many waiters", here(manyWaiters), {2, 3}},
      {"hosts: exchange", apart(exchange, "two in turns"), {2, 3, 5}, false},
      {"hosts: exchange, each alone", apart(exchange, "alone"), {3, 4}, false},
      {"hosts: edges", apart(edges, "alone"), {2}, false},
      {"hosts: edges between hosts", apart(remoteEdges, "alone"), {2}, false},
      {"hosts: flood", apart(flood, "alone"), {2}, false},
      {"hosts: unattended messages", apart(unattended, "alone"), {2}, false},
      {"hosts: beside collectives", apart(besideCollectives, "halves"), {2, 4}, false},
      {"hosts: many waiters", apart(manyWaiters, "one aside"), {2, 3}, false}};
  for (Test& test : pointToPointFaultTests()) tests.push_back(std::move(test));
  return tests;
}

}  // namespace stress
