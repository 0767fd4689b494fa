// Groups on several simulated hosts: every collective over both layers, and their faults. The ranks
// are threads, and the network is in memory.
#include <algorithm>
#include <thread>

#include "memory_network.hpp"
#include "stress_harness.hpp"

namespace stress {
namespace {

constexpr Collective kRooted[] = {Collective::Broadcast, Collective::Reduce, Collective::Gather,
                                  Collective::Scatter};

void everywhere(Rank& me) {
  Random random(1);
  for (const std::string placement : kPlacements) {
    GroupOptions options = onHosts(placement, me);
    if (placement == "alone") options.tuning.linkBytes = 1;  // more steps, for short messages too
    const Engine engine = me.group("hosts " + placement, options);
    for (const Collective collective : kCollectives) {
      for (const std::size_t count : {0, 1, 7, 512, 1024, 3000, 40000, 70001}) {
        runChecked(me, *engine, draw(random, collective, count, me.size));
      }
    }
    for (int i = 0; i < 2 && placement == "alone"; ++i) {  // several chunks
      runChecked(me, *engine, draw(random, Collective::AllReduce, 700001, me.size));
      runChecked(me, *engine, draw(random, Collective::Reduce, 700001, me.size));
      runChecked(me, *engine, draw(random, Collective::ReduceScatter, 200001, me.size));
    }
    REQUIRE(engine->isRemote(), "one host");
    engine->shutdown();
  }
}

/// A rank leaves as soon as its result is complete; the others, one of them late, still get its
/// data.
void leaveBeforeALateRank(Rank& me) {
  Random random(3);
  for (int round = 0; round < 10 * effort; ++round) {
    const Engine engine = me.group(concat("leave late", round), onHosts("alone", me));
    for (const Collective collective : kRooted) {
      if (chance(random, 2)) continue;
      if (me.rank == 1) std::this_thread::sleep_for(Milliseconds(3));
      runChecked(me, *engine, draw(random, collective, drawBelow(random, 60000), me.size));
    }
    engine->shutdown();
  }
}

/// A rank leaves after it has sent all its data, before others have begun.
void leaveEarly(Rank& me) {
  for (int round = 0; round < 3 * effort; ++round) {
    const Engine engine = me.group(concat("early", round), onHosts("alone", me));
    runChecked(me, *engine, sum(10));
    if (me.rank == 1) std::this_thread::sleep_for(Milliseconds(500));
    Random random(round);
    for (const Collective collective : {Collective::Broadcast, Collective::Broadcast,
                                        round % 2 == 0 ? Collective::Reduce : Collective::Gather}) {
      Plan plan = draw(random, collective, round == 2 ? 14000 : 100, me.size);
      plan.root = 0;
      plan.dtype = DType::Float32;
      runChecked(me, *engine, plan);
    }
    engine->shutdown();
  }
}

/// A sending root is ahead of the others by many calls, each with its own data.
void aheadOfOthers(Rank& me) {
  const Engine engine = me.group("ahead", onHosts("alone", me));
  Random random(5);
  for (int round = 0; round < 200 * effort; ++round) {
    const bool broadcast = drawBelow(random, 3) > 0;
    Plan plan = draw(random, broadcast ? Collective::Broadcast : Collective::Scatter,
                     drawBelow(random, 6000), me.size);
    plan.root = round / 50 % me.size;
    if (me.rank != plan.root && round % 20 == 0) std::this_thread::sleep_for(Milliseconds(5));
    runChecked(me, *engine, plan);
  }
  engine->shutdown();
}

/// One rank runs another collective than the rest, or passes another root. Ranks that pass
/// different roots get the error in this call or in the next one.
void disagreement(Rank& me) {
  for (int round = 0; round < 9 * effort; ++round) {
    const bool roots = round >= 5 * effort;
    const Engine engine = me.usedGroup(concat("disagree", round),
                                       onHosts(roots ? "alone" : kPlacements[round % 5], me));
    Plan plan = sum(roots ? 100 : 10);
    if (roots) {
      plan.collective = kRooted[round % 4];
      plan.op = plan.collective == Collective::Reduce ? ReduceOp::Sum : ReduceOp::None;
      plan.root = me.rank == me.size - 1 ? 1 : 0;
    } else if (me.rank == 0) {
      plan.count = 100000;
    }
    requireFault({"Detected mismatch"}, [&] {
      engine->runInline(job(me, plan));
      engine->runInline(job(me, sum(10)));
    });
    me.sync();
    engine->shutdown();
  }
}

}  // namespace

GroupOptions onHosts(const std::string& placement, const Rank& me) {
  const auto hostOf = [&placement, &me](int rank) -> std::string {
    if (placement == "halves") return rank < me.size / 2 ? "a" : "b";
    if (placement == "two in turns") return std::to_string(rank % 2);
    if (placement == "three in turns") return std::to_string(rank % 3);
    if (placement == "one aside") return rank == 0 ? "a" : "b";
    return std::to_string(rank);
  };
  GroupOptions options;
  options.sharedMemory = "auto";
  options.hostId = hostOf(me.rank);
  return options;
}

std::vector<Test> hostTests() {
  return {{"hosts: everywhere", everywhere, {2, 3, 4, 5, 6}, false},
          {"hosts: leave before a late rank", leaveBeforeALateRank, {2, 5}, false},
          {"hosts: leave early", leaveEarly, {3, 4}, false},
          {"hosts: ahead of others", aheadOfOthers, {2, 3, 5}, false},
          {"hosts: disagreement", disagreement, {2, 3, 4, 5}, false}};
}

}  // namespace stress
