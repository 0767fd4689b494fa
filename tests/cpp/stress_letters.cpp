#include "stress_letters.hpp"

#include <algorithm>
#include <iterator>
#include <map>
#include <tuple>

namespace stress {
namespace {

/// Sizes at the edges of each path: in a record's line, in one record, in cells, eager, and by
/// rendezvous; and beyond a whole ring.
std::size_t drawBytes(Random& random) {
  constexpr std::size_t kEdges[] = {PairRecord::kInlineBytes, PairRecord::kLine,
                                    PairChannel::kSmallBytes, PairCells::kBytes,
                                    4 * PairCells::kBytes,    PointToPoint::kEagerBytes};
  switch (drawBelow(random, 8)) {
    case 0:
      return 0;
    case 1:
    case 2:
      return kEdges[drawBelow(random, std::size(kEdges))] + drawBelow(random, 3) - 1;
    case 3:
      return drawBelow(random, 400000);
    case 4:
      return chance(random, 8) ? 2500000 + drawBelow(random, 1000) : drawBelow(random, 200);
    default:
      return drawBelow(random, 5000);
  }
}

}  // namespace

PointToPoint& pointToPoint(CpuEngine& engine) {
  return engine.pointToPoint("send", 0);
}

std::shared_ptr<Arena> arenaOf(CpuEngine& engine) {
  engine.process()->start(engine.config().settings.arenaBytes);
  return engine.process()->arena();
}

std::vector<TransferRef> post(Rank& me, PointToPoint& p2p, const std::vector<Letter>& letters,
                              Random& own, const std::shared_ptr<Arena>& arena) {
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
    transfers.push_back(begin(p2p, lane->second.front(), std::get<0>(lane->first),
                              chance(own, 2) ? arena : nullptr));
    if (chance(own, 20)) loiter(own, 200);
    lane->second.erase(lane->second.begin());
    if (lane->second.empty()) lanes.erase(lane);
  }
  return transfers;
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

}  // namespace stress
