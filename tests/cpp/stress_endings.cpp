// Ranks that end: they leave, with or without threads inside, or are killed.

#include <csignal>
#include <thread>

#include "stress_harness.hpp"

namespace stress {
namespace {

/// A rank ends its engine while the others wait for it.
void leaves(Rank& me) {
  for (int round = 0; round < 6 * effort; ++round) {
    const Engine engine = me.usedGroup(concat("left", round));
    if (me.rank == 0) {
      std::this_thread::sleep_for(Milliseconds(round % 2 == 0 ? 0 : 15));
      engine->shutdown();
      continue;
    }
    const std::string text = requireFault({"left the group", "destroyed"}, [&] {
      engine->runInline(job(me, sum(round % 3 == 0 ? 10 : 20000)));
    });
    // The first rank that noticed it sets the text, so it may name another rank that has failed.
    REQUIRE(text.find("rank") != std::string::npos, text);
  }
}

/// An engine ends while its own threads wait in it, or have work in the queue.
void endsUnderWaiters(Rank& me) {
  for (int round = 0; round < 5 * effort; ++round) {
    Engine engine = me.usedGroup(concat("under", round));
    if (me.rank == 0) {
      me.read(concat("gone", round));
      continue;
    }
    std::vector<std::thread> waiters;
    std::atomic<int> failed{0};
    for (int i = 0; i < 3 && me.rank == 1; ++i) {
      // Each waiter holds the engine: the last one to return destroys it.
      waiters.emplace_back([&failed, &me, engine, i] {
        const auto task = job(me, sum(10));
        try {
          if (i == 0) {
            engine->runInline(task);
          } else {
            engine->submit(task);
            finish(*engine, *task);
          }
        } catch (const Error&) {
          ++failed;
        }
      });
    }
    if (me.rank == 1) {
      std::this_thread::sleep_for(Milliseconds(10));
      engine->shutdown();
      engine.reset();
      for (auto& waiter : waiters) waiter.join();
      REQUIRE(failed == 3, failed.load());
      me.note(concat("gone", round), "yes");
    }
  }
}

/// Rank 1 ends its engine while one of its threads is stopped in a collective and may write into
/// rank 0's ring. Rank 0 must not reuse that memory before the thread has returned.
void endsUnderAStoppedThread(Rank& me) {
  GroupOptions large;
  large.ringBytes = 1 << 20;
  const Engine other = me.group("other");
  runChecked(me, *other, sum(10));
  const std::size_t before = other->info().sharedBytes;
  const auto prune = [&](const char* name) {
    me.sync();
    const Engine engine = me.group(name);
    runChecked(me, *engine, sum(10));
  };
  const auto holds = [&] { return other->info().sharedBytes >= before + large.ringBytes; };
  Engine engine = me.group("stopped inside", large);
  runChecked(me, *engine, sum(20000));
  me.sync();
  std::thread inside;
  if (me.rank == 1) {
    inside = std::thread([&me, engine] {
      const auto task = job(me, sum(20000));
      task->beforeTransfer = [&me] {
        me.note("inside", "yes");
        me.read("go on");
      };
      try {
        engine->runInline(task);
      } catch (const Error&) {
      }
    });
    me.read("inside");
    engine->shutdown();
  } else {
    requireFault({"destroyed"}, [&] { engine->runInline(job(me, sum(20000))); });
  }
  me.sync();
  engine.reset();
  std::this_thread::sleep_for(Milliseconds(1200));  // longer than memory is retired
  prune("while it is inside");
  if (me.rank == 0) {
    REQUIRE(holds());
    me.note("go on", "yes");
  }
  if (inside.joinable()) inside.join();
  prune("when it is out");
  std::this_thread::sleep_for(Milliseconds(1200));
  prune("after the retirement");
  REQUIRE(!holds());
}

/// A rank is killed at a random moment: the others report it.
void killed(Rank& me) {
  Random shared(400);
  Random own(401u + static_cast<unsigned>(me.rank));
  const Engine engine = me.group("killed");
  runChecked(me, *engine, sum(10));
  const auto after = Milliseconds(static_cast<int>(drawBelow(own, 50)));
  if (me.rank == 0) {
    std::thread([after] {
      std::this_thread::sleep_for(after);
      ::raise(SIGKILL);
    }).detach();
  }
  try {
    for (;;) runChecked(me, *engine, drawAny(shared, me.size, 8000));
  } catch (const Error& error) {
    const std::string text = error.what();
    REQUIRE(text.find("process died") != std::string::npos, text);
  }
}

}  // namespace

std::vector<Test> endingTests() {
  return {{"a rank leaves", leaves, {2, 4}},
          {"an engine ends under its waiters", endsUnderWaiters, {2, 3}},
          {"an engine ends under a stopped thread", endsUnderAStoppedThread, {2}, true, -1, false},
          {"killed", killed, {2, 3, 5}, true, 0, false}};
}

}  // namespace stress
