// Digests of collectives (FASTCOLL_DIGEST): a wrong bit of a result is an error of the next
// collective, which names the rank and the call. Other tests run with digests too, and so show that
// no right result is one.
#include <algorithm>
#include <cstring>
#include <vector>

#include "memory_network.hpp"
#include "reduce/digest.hpp"
#include "stress_harness.hpp"

namespace stress {
namespace {

/// Parts in any order have the digest of the whole, with each instruction set; a bit, an exchange
/// of two words or a moved byte changes it.
void ofBytes(Rank&) {
  Random random(1);
  const std::string best = reduceIsa();
  for (int round = 0; round < often(500); ++round) {
    std::vector<std::uint8_t> bytes(8 + drawBelow(random, round % 5 == 0 ? 20000 : 300));
    for (auto& byte : bytes) byte = static_cast<std::uint8_t>(random());
    const auto whole = [&bytes] { return digestOf(0, bytes.data(), bytes.size()); };
    const std::uint64_t digest = whole();
    std::vector<std::size_t> cuts = {0, bytes.size()};
    while (cuts.size() < 6) cuts.push_back(drawBelow(random, bytes.size()));
    std::ranges::sort(cuts);
    std::uint64_t parts = 0;
    for (std::size_t i = cuts.size() - 1; i > 0; --i) {
      parts += digestOf(cuts[i - 1], bytes.data() + cuts[i - 1], cuts[i] - cuts[i - 1]);
    }
    REQUIRE(parts == digest, "of parts");
    setReduceIsa("baseline");
    REQUIRE(whole() == digest, "with the baseline");
    setReduceIsa(best.c_str());
    auto& flipped = bytes[drawBelow(random, bytes.size())];
    flipped ^= static_cast<std::uint8_t>(1u << drawBelow(random, 8));
    REQUIRE(whole() != digest, "of another bit");
    const std::uint64_t before = whole();
    const std::size_t words = bytes.size() / 4, a = drawBelow(random, words);
    const std::size_t b = drawBelow(random, words);
    if (std::memcmp(&bytes[4 * a], &bytes[4 * b], 4) != 0) {
      std::swap_ranges(&bytes[4 * a], &bytes[4 * a] + 4, &bytes[4 * b]);
      REQUIRE(whole() != before, "of exchanged words");
    }
  }
}

// Where the kernel below flips a bit: of the result, or of the copy that a peer gets.
thread_local std::size_t flipAt = 0;
thread_local bool flips = false;

void flippingSum(const ReduceArgs& args) {
  reduceFunction(DType::Float32, ReduceOp::Sum)(args);
  if (!std::exchange(flips, false)) return;
  auto* const to = static_cast<std::uint8_t*>(args.copy != nullptr ? args.copy : args.dst);
  to[flipAt / 8 % (args.count * sizeof(float))] ^= static_cast<std::uint8_t>(1u << flipAt % 8);
}

GroupOptions digesting(GroupOptions options = {}) {
  options.digest = "all";
  return options;
}

/// Every rank's next collective fails, and names the call and the rank; of two ranks, both.
void requireNamed(Rank& me, const Engine& engine, int guilty) {
  const std::string call = concat("the result of all_reduce(seq ", engine->sequence(), ", ");
  const std::string text = requireFault({call}, [&] { engine->runInline(job(me, sum(10))); });
  const std::string apart = concat(" has other bits on rank ", guilty, " (");
  const bool named =
      text.find(apart) != std::string::npos && text.find(" than on ") != std::string::npos;
  const bool both = text.find(" differs between rank ") != std::string::npos;
  REQUIRE(me.size == 2 ? both : named, "expected rank ", guilty, ": ", text);
}

/// A reduction writes a wrong bit to the result of one rank: its own if every rank reduces all,
/// else that of the next rank, by the ring or in its memory.
void wrongBit(Rank& me) {
  Random shared(2);
  for (int round = 0; round < often(40); ++round) {
    GroupOptions options = digesting();
    options.tuning.directAllReduceBytes = 30000;
    const Engine engine = me.usedGroup(concat("bit", round), options);
    constexpr std::size_t kCounts[] = {10, 1000, 5000, 20000};
    Plan plan = sum(kCounts[round % 4]);
    plan.inPlace = round % 4 == 3;
    const bool oneShot = plan.count <= 1000;
    const int culprit = static_cast<int>(drawBelow(shared, static_cast<std::size_t>(me.size)));
    flipAt = drawBelow(shared, 1000);
    flips = me.rank == culprit;
    const auto task = std::make_shared<Job>(plan, me.rank, me.size, Milliseconds(30000),
                                            round % 4 == 3 ? engine->process()->arena() : nullptr);
    task->request.kernel = flippingSum;
    engine->runInline(task);
    REQUIRE(!flips, "no bit was flipped");
    requireNamed(me, engine, oneShot ? culprit : (culprit + 1) % me.size);
  }
}

/// A bit flips on its way between two hosts. The leaders compare, or the ranks of a host.
void wrongBitBetweenHosts(Rank& me) {
  for (int round = 0; round < often(12); ++round) {
    const Engine engine =
        me.usedGroup(concat("link", round), digesting(onHosts(kPlacements[round % 5], me)));
    if (me.rank == 0) MemoryNetwork::flipIn = 4000;
    me.sync();
    Plan plan;
    plan.collective = round % 2 == 0 ? Collective::Broadcast : Collective::AllGather;
    plan.root = round % 2 == 0 ? 0 : -1;
    plan.count = 6000;
    const auto task = job(me, plan);
    engine->runInline(task);
    me.sync();
    REQUIRE(MemoryNetwork::flipIn == 0, "no bit was flipped");
    requireFault({concat("the result of ", collectiveName(plan.collective), "(seq 2, ")},
                 [&] { engine->runInline(job(me, sum(10))); });
  }
}

// The byte that the kernel below changes, once.
thread_local std::uint8_t* changes = nullptr;

void changingSum(const ReduceArgs& args) {
  reduceFunction(DType::Float32, ReduceOp::Sum)(args);
  if (changes != nullptr) *std::exchange(changes, nullptr) ^= 4;
}

/// The end of a rank's input changes while the ranks reduce its beginning, so all get the same
/// result. The next call names the rank.
void changedInput(Rank& me) {
  Random shared(3);
  for (int round = 0; round < often(30); ++round) {
    GroupOptions options = digesting();
    options.tuning.segmentBytes = 8192;
    const Engine engine = me.usedGroup(concat("changed", round), options);
    const int culprit = static_cast<int>(drawBelow(shared, static_cast<std::size_t>(me.size)));
    constexpr Collective kSums[] = {Collective::AllReduce, Collective::ReduceScatter,
                                    Collective::Reduce};
    Plan plan = sum(30000 + drawBelow(shared, 1000));
    plan.collective = kSums[round % 3];
    plan.root = plan.collective == Collective::Reduce ? culprit : -1;
    const auto task = job(me, plan);
    task->request.kernel = changingSum;
    const std::size_t bytes = task->request.in.back().bytes();
    const std::size_t at = bytes - 1 - drawBelow(shared, 100);
    // A rank reads its own message of a reduce_scatter, and fills segments with the others.
    const Message& message = round % 2 == 0 ? task->request.in.back() : task->request.in.front();
    if (me.rank == culprit) changes = message.contiguous(at, 1);
    engine->runInline(task);
    REQUIRE(changes == nullptr, "nothing was changed");
    const std::string call =
        concat(" to ", collectiveName(plan.collective), "(seq ", engine->sequence(), ", ");
    const std::string text = requireFault({call}, [&] { engine->runInline(job(me, sum(10))); });
    const bool named = text.find(concat("the input of rank ", culprit, " (")) != text.npos &&
                       text.find(" changed during the call") != text.npos;
    REQUIRE(named, "expected rank ", culprit, ": ", text);
  }
}

}  // namespace

std::vector<Test> digestTests() {
  return {{"digests of bytes", ofBytes, {1}},
          {"digests: a wrong bit", wrongBit, {2, 3, 4, 8}},
          {"digests: a changed input", changedInput, {2, 3, 4, 8}},
          {"digests: a wrong bit between hosts", wrongBitBetweenHosts, {3, 4}, false}};
}

}  // namespace stress
