// Tests that the two ranks of a pair agree on which of them holds a cell. The stress program tests
// the bytes in the cells.
#include "cpu/point_to_point/pair_cells.hpp"

#include <cstdio>
#include <cstdlib>
#include <set>
#include <vector>

using namespace fastcoll;

namespace {

constexpr std::size_t kCount = 4;

void expect(bool holds, const char* what) {
  if (holds) return;
  std::fprintf(stderr, "pair_cells_test: %s\n", what);
  std::exit(1);
}

/// Two ranks, each with its own view of both blocks.
struct Pair {
  std::vector<std::uint8_t> blocks[2]{std::vector<std::uint8_t>(PairCells::blockBytes(2 << 20)),
                                      std::vector<std::uint8_t>(PairCells::blockBytes(2 << 20))};
  PairCells cells[2];

  void open(int rank) {
    cells[rank].addOwn(blocks[rank].data(), kCount);
    cells[1 - rank].addPeers(blocks[rank].data(), kCount);
  }
  /// Passes a cell from the rank to the other; its memory, or nullptr if the rank holds none.
  std::uint8_t* pass(int rank) {
    const std::uint8_t number = cells[rank].take();
    if (number == 0) return nullptr;
    std::uint8_t* const memory = cells[rank].at(number);
    const std::uint8_t there = cells[1 - rank].numberOf(number);
    expect(memory != nullptr && cells[1 - rank].at(there) == memory, "both mean the same memory");
    cells[1 - rank].keep(there);
    return memory;
  }
  /// How many cells the rank holds. It passes them all.
  std::size_t passAll(int rank) {
    std::set<std::uint8_t*> different;
    while (std::uint8_t* const memory = pass(rank)) different.insert(memory);
    return different.size();
  }
};

void oneDirectionRunsOut() {
  Pair pair;
  pair.open(0);
  expect(pair.passAll(0) == kCount, "a rank has the cells of its block");
  expect(pair.pass(0) == nullptr, "and no more");
}

void theLastReadComesFirst() {
  Pair pair;
  pair.open(0);
  pair.open(1);
  for (int turn = 0; turn < 3; ++turn) {
    std::uint8_t* const there = pair.pass(0);
    expect(pair.pass(1) == there, "what was read last comes back");
  }
}

void whoReceivesFirstBringsItsCellsToo() {
  Pair pair;
  pair.open(0);
  std::uint8_t* last = nullptr;
  for (int i = 0; i < 3; ++i) last = pair.pass(0);
  pair.open(1);
  expect(pair.pass(1) == last, "new cells are taken last");
  expect(pair.passAll(1) == kCount + 2, "no cell is lost");
  expect(pair.passAll(0) == 2 * kCount, "and all pass on");
}

void numbersOfABrokenPeer() {
  Pair pair;
  expect(pair.cells[0].at(pair.cells[0].numberOf(1)) == nullptr, "there is no block yet");
  pair.open(0);
  expect(pair.cells[0].at(pair.cells[0].numberOf(1)) == nullptr, "the peer has no block");
  pair.open(1);
  for (std::size_t number = 0; number < 256; ++number) {
    const std::uint8_t here = pair.cells[0].numberOf(static_cast<std::uint8_t>(number));
    const bool some = pair.cells[0].at(here) != nullptr;
    expect(some == (number >= 1 && number <= 2 * kCount), "as many as there are");
  }
  for (int i = 0; i < 100; ++i) pair.cells[0].keep(1);
  for (std::size_t i = 0; i < 2 * kCount; ++i) pair.cells[0].take();
  expect(pair.cells[0].take() == 0, "never more than the pair has");
}

void fewerBesideSmallRings() {
  expect(PairCells::countFor(2 << 20) == 4 && PairCells::countFor(1 << 30) == 4, "four");
  expect(PairCells::countFor(1 << 20) == 2 && PairCells::countFor(128 * 1024) == 0, "fewer");
}

}  // namespace

int main() {
  oneDirectionRunsOut();
  theLastReadComesFirst();
  whoReceivesFirstBringsItsCellsToo();
  numbersOfABrokenPeer();
  fewerBesideSmallRings();
}
