// Several groups at once, groups that are made and ended, and names that are used again.
#include <algorithm>
#include <thread>

#include "base/cores.hpp"
#include "base/worker_pool.hpp"
#include "stress_letters.hpp"

namespace stress {
namespace {

/// Every rank has one thread for each group.
void threadsAndGroups(Rank& me) {
  together(3, [&](int g) {
    Random shared(60u + static_cast<unsigned>(g));
    const Engine engine = me.group(concat("thread", g));
    std::vector<JobRef> open;
    for (int i = 0; i < often(80); ++i) {
      open.push_back(std::make_shared<Job>(drawAny(shared, me.size, 2000), me.rank, me.size));
      engine->submit(open.back());
      if (open.size() < 4) continue;
      finish(*engine, *open.front());
      open.erase(open.begin());
    }
    for (const auto& job : open) finish(*engine, *job);
  });
}

/// The ranks use two groups in opposite orders; asynchronous work must not wait across groups.
void crossedOrder(Rank& me) {
  Random shared(70);
  const Engine engines[2] = {me.group("cross0"), me.group("cross1")};
  for (int i = 0; i < often(100); ++i) {
    const Plan plans[2] = {drawAny(shared, me.size, 1000), drawAny(shared, me.size, 1000)};
    JobRef jobs[2];
    for (int step = 0; step < 2; ++step) {
      const int g = (me.rank + step) % 2;
      jobs[g] = std::make_shared<Job>(plans[g], me.rank, me.size);
      engines[g]->submit(jobs[g]);
    }
    for (int step = 0; step < 2; ++step) {
      const int g = (me.rank + i + step) % 2;
      finish(*engines[g], *jobs[g]);
    }
  }
}

/// A group ends right after its last collective, of any kind: no rank may lose data.
Body leaveAtOnce(bool hosts) {
  return [hosts](Rank& me) {
    Random shared(80);
    Random own(81u + static_cast<unsigned>(me.rank));
    for (int round = 0; round < often(90); ++round) {
      const Engine engine = me.group(concat("last", round),
                                     hosts ? onHosts(kPlacements[round % 5], me) : GroupOptions());
      const auto collective = static_cast<Collective>(round % 9);
      const std::size_t count = round % 2 == 0 ? 50 : 9000;
      for (int i = 0; i < 2; ++i) runChecked(me, *engine, draw(shared, collective, count, me.size));
      if (chance(own, 3)) loiter(own, 300);
      engine->shutdown();
    }
  };
}

/// Groups give back what they used: shared memory, descriptors, threads.
void comeAndGo(Rank& me) {
  Random shared(90);
  const Engine anchor = me.group("anchor");
  runChecked(me, *anchor, draw(shared, Collective::Barrier, 0, me.size));
  me.sync();
  drainWorkers();
  me.sync();
  std::size_t used = 0;
  int descriptors = 0;
  int threads = 0;
  if (me.rank == 0 || me.process) {  // counting opens a folder that another rank would count
    used = anchor->info().sharedBytes;
    descriptors = openDescriptors();
    threads = runningThreads();
  }
  me.sync();
  for (int round = 0; round < often(40); ++round) {
    const Engine engine = me.group(concat("go", round));
    for (int i = 0; i < 3; ++i) {
      const auto job = std::make_shared<Job>(drawAny(shared, me.size, 3000), me.rank, me.size);
      engine->submit(job);
      finish(*engine, *job);
    }
    if (round % 3 == 0) engine->shutdown();
  }
  me.sync();
  drainWorkers();
  me.sync();
  if (me.rank == 0 || me.process) {
    // Workers release their group shortly after its last task.
    const auto end = Clock::now() + Milliseconds(60000);
    const auto back = [&] {
      return anchor->info().sharedBytes == used && openDescriptors() <= descriptors &&
             runningThreads() <= threads;
    };
    while (!back() && Clock::now() < end) std::this_thread::sleep_for(Milliseconds(5));
    const std::size_t now = anchor->info().sharedBytes;
    REQUIRE(now == used, now, " bytes, ", used, " before");
    REQUIRE(openDescriptors() <= descriptors, openDescriptors(), " descriptors, ", descriptors,
            " before");
    REQUIRE(runningThreads() <= threads, runningThreads(), " threads, ", threads, " before");
  }
  me.sync();
}

/// The process's last group ends and a new one begins: arena, socket and keeper are made again.
void startAgain(Rank& me) {
  Random shared(91);
  for (int round = 0; round < often(15); ++round) {
    const Engine engine = me.group(concat("again", round));
    runChecked(me, *engine, drawAny(shared, me.size, 2000));
  }
}

/// Groups with the same name, each made at random before or after the end of the previous one.
void staleNames(Rank& me) {
  Random shared(92);
  Random own(93u + static_cast<unsigned>(me.rank));
  std::vector<Engine> old;
  for (int round = 0; round < often(40); ++round) {
    const Engine engine = me.group("same name");
    const bool letters = chance(shared, 2);
    const Plan plan = drawAny(shared, me.size, 2000);
    if (chance(own, 2)) loiter(own, 3000);
    if (!old.empty() && chance(own, 2)) old.clear();
    if (letters) {
      // A message in a ring before any collective, of another byte each round.
      auto& p2p = pointToPoint(*engine);
      const int next = (me.rank + 1) % me.size, before = (me.rank + me.size - 1) % me.size;
      const std::uint64_t seed = 8 * static_cast<std::uint64_t>(round);
      const TransferRef pair[] = {begin(p2p, {me.rank, next, 0, 1, seed}, true),
                                  begin(p2p, {before, me.rank, 0, 1, seed}, false)};
      for (const auto& transfer : pair) {
        p2p.wait(transfer, TimePoint::max());
        transfer->check();
      }
    }
    runChecked(me, *engine, plan);
    old.push_back(engine);
    // A rank that is ahead may publish the next instance while others are still in this one's
    // collective. It must not do so before all have finished the rendezvous of this one.
    runChecked(me, *engine, draw(shared, Collective::Barrier, 0, me.size));
  }
}

void pool(Rank& me) {
  std::atomic<int> ran{0};
  for (int round = 0; round < 20 * effort; ++round) {
    for (int i = 0; i < 20; ++i) runOnWorker([&ran] { ++ran; });
    if (round % 3 == 0) drainWorkers();
  }
  while (ran < 400 * effort) std::this_thread::sleep_for(Milliseconds(1));
  me.sync();
  drainWorkers();
  REQUIRE(ran == 400 * effort, ran.load(), " jobs");
}

/// A rank's part of the cores and of the granted time.
void coresOfARank(Rank&) {
  const CoreSet eight(0xff), four(0xf0), last(0x80);
  constexpr int kAll = 1 << 20;
  REQUIRE(coresEach(eight, {eight, eight}, kAll) == 4, "two ranks on eight cores");
  REQUIRE(coresEach(eight, {eight, eight, eight}, kAll) == 2, "three ranks on eight cores");
  REQUIRE(coresEach(four, {four, CoreSet(0xf)}, kAll) == 4, "ranks bound apart");
  REQUIRE(coresEach(last, {last, eight}, kAll) == 0, "one core for two ranks");
  REQUIRE(coresEach(eight, {eight, eight}, 3) == 1, "time of three cores");
  REQUIRE(coresEach(eight, {eight, CoreSet()}, kAll) == 0, "a rank that may run anywhere");
  REQUIRE(coresOfProcess(5) <= 5 && coresOfProcess(kAll) <= 5, "the fewest of all groups");
}

}  // namespace

std::vector<Test> groupTests() {
  return {{"cores of a rank", coresOfARank, {1}},
          {"a thread a group", threadsAndGroups, {2, 3}},
          {"groups in crossed order", crossedOrder, {2, 3}},
          {"leave at once", leaveAtOnce(false), {2, 3, 5}},
          {"hosts: leave at once", leaveAtOnce(true), {2, 5}, false},
          {"come and go", comeAndGo, {2, 4}},
          {"start again", startAgain, {2, 3}},
          {"stale names", staleNames, {2, 3}},
          {"worker pool", pool, {3}, false}};
}

}  // namespace stress
