// Ranks that abort, disagree or throw. What the errors of a timeout and of a mismatch say is tested
// in tests/faults/test_silence.py and test_mismatch.py.
#include <thread>

#include "stress_harness.hpp"

namespace stress {
namespace {

/// One rank does not arrive, and the others wait, in a different way each round. It aborts or, on
/// one host, one of those that wait does.
Body abortDuringWait(bool hosts) {
  return [hosts](Rank& me) {
    for (int round = 0; round < (hosts ? 20 : 12) * effort; ++round) {
      const Engine engine = me.usedGroup(
          concat("abort", round), hosts ? onHosts(kPlacements[round % 5], me) : GroupOptions());
      const std::vector<std::string> cause = {"told to stop"};
      const bool outside = hosts || round / 2 % 2 == 1;
      const int absent = outside ? me.size - 1 : 0;
      const auto abort = [&] {
        std::this_thread::sleep_for(Milliseconds(5 + 5 * (round % 6)));
        engine->abort(ErrorKind::Backend, "told to stop");
        me.note(concat("aborted", round), "yes");
      };
      if (me.rank == absent) {
        if (outside) abort();
        me.read(concat("aborted", round));
      } else {
        std::jthread killer;
        if (!outside && me.rank == 1) killer = std::jthread(abort);
        const auto task = job(me, sum(round % 2 == 0 ? 10 : 60000));
        requireFault(cause, [&] {
          if (round % 3 == 0) return engine->runInline(task);
          engine->submit(task);
          finish(*engine, *task);
        });
      }
      requireFault(cause, [&] { engine->runInline(job(me, sum(10))); });
      REQUIRE(engine->faulted());
      me.sync();
    }
  };
}

/// An abort before or during the rendezvous.
void abortDuringRendezvous(Rank& me) {
  for (int round = 0; round < often(15); ++round) {
    Random own(100u + static_cast<unsigned>(me.rank * 100 + round));
    const Engine engine = me.group(concat("early", round));
    std::jthread killer;
    if (me.rank == 0) killer = abortAfter(engine, drawBelow(own, 2000), "told to stop");
    // Even an early abort ends the group on all ranks. A rank that was still in the rendezvous when
    // rank 0 aborted notices it at its timeout.
    std::string text;
    try {
      for (const auto end = Clock::now() + Milliseconds(10000); Clock::now() < end;) {
        const auto task = job(me, sum(10), 1500);
        engine->runInline(task);
        task->verify();
      }
    } catch (const Error& error) {
      text = error.what();
    }
    REQUIRE(!text.empty(), "a group outlived its abort");
    me.sync();
  }
}

/// A task's code around the transfer throws on one rank.
void throwsInside(Rank& me) {
  for (int round = 0; round < 6; ++round) {
    const Engine engine = me.usedGroup(concat("throws", round));
    const auto task = job(me, sum(1000));
    if (me.rank == 0) {
      task->beforeTransfer = [round] {
        if (round % 3 == 0) throw Error(ErrorKind::Value, "thrown on purpose");
        if (round % 3 == 1) throw std::runtime_error("thrown on purpose");
        throw 7;
      };
    }
    const auto run = [&] {
      if (round < 3) return engine->runInline(task);
      engine->submit(task);
      finish(*engine, *task);
    };
    if (me.rank == 0) {
      bool thrown = false;
      try {
        run();
      } catch (...) {
        thrown = true;
      }
      REQUIRE(thrown);
    } else {
      requireFault({"thrown on purpose", "interrupted"}, run);
    }
    requireFault({"thrown on purpose", "interrupted"},
                 [&] { engine->runInline(job(me, sum(10))); });
    engine->shutdown();
  }
}

/// One rank aborts, leaves or disagrees during random collectives, and every rank that fails leaves
/// at once. Each result that is reported as success must still be right.
void storm(Rank& me) {
  for (int round = 0; round < often(50); ++round) {
    Random shared(200u + static_cast<unsigned>(round));
    Random own(300u + static_cast<unsigned>(round * 10 + me.rank));
    Engine engine = me.group(concat("storm", round));
    bool begun = true;
    try {
      runChecked(me, *engine, sum(10));
    } catch (const Error&) {
      begun = false;  // a slow rank is still in it when the storm begins
    }
    const int culprit = static_cast<int>(drawBelow(shared, static_cast<std::size_t>(me.size)));
    const std::size_t after = drawBelow(shared, 4000);
    const int kind = round % 3;
    std::jthread killer;
    if (me.rank == culprit && kind != 2) {
      killer = std::jthread([engine, after, kind] {
        std::this_thread::sleep_for(std::chrono::microseconds(after));
        if (kind == 0) engine->abort(ErrorKind::Backend, "the storm");
        if (kind == 1) engine->shutdown();
      });
    }
    try {
      std::vector<JobRef> open;
      for (std::size_t i = 0; begun; ++i) {
        Plan plan = drawAny(shared, me.size, 8000);
        if (kind == 2 && me.rank == culprit && i == after / 100) plan = sum(12345);
        const auto task = job(me, plan);
        if (chance(own, 2)) {
          engine->runInline(task);
          task->verify();
          continue;
        }
        engine->submit(task);
        open.push_back(task);
        if (open.size() < 4) continue;
        finish(*engine, *open.front());
        open.erase(open.begin());
      }
    } catch (const Error&) {
    }
    if (chance(own, 2)) engine.reset();
    if (killer.joinable()) killer.join();
    engine.reset();
  }
}

/// Rank 0 runs another call. A rank may leave while another one still reads its segments: no rank
/// may report success.
void leavesAfterMismatch(Rank& me) {
  for (int round = 0; round < 6 * effort; ++round) {
    const Engine engine = me.usedGroup(concat("mismatch", round));
    Plan plan = sum(round % 2 == 0 ? 100 : 20000);
    if (me.rank == 0) {
      switch (round / 2 % 3) {
        case 0:
          plan.count += 1;
          break;
        case 1:
          plan.op = ReduceOp::Max;
          break;
        default:
          plan = Plan();  // a barrier
          break;
      }
    }
    requireFault({"Detected mismatch"}, [&] { engine->runInline(job(me, plan)); });
    if (me.rank % 2 == 0) engine->shutdown();
  }
}

}  // namespace

std::vector<Test> faultTests() {
  return {{"abort during a wait", abortDuringWait(false), {2, 4}},
          {"hosts: abort during a wait", abortDuringWait(true), {2, 4, 5}, false},
          {"abort during the rendezvous", abortDuringRendezvous, {2, 3}},
          {"leaves after a mismatch", leavesAfterMismatch, {2, 3}},
          {"throws inside", throwsInside, {2, 3}},
          {"storm", storm, {2, 3, 4}}};
}

}  // namespace stress
