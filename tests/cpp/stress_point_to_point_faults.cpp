// Point-to-point with senders that leave or die, ranks that abort, peers that do not arrive, and a
// system that starts no thread.
#include <dlfcn.h>
#include <pthread.h>
#include <signal.h>

#include <atomic>
#include <cerrno>
#include <thread>

#include "base/worker_pool.hpp"
#include "stress_letters.hpp"

// The sanitizers replace this function themselves.
#if !defined(__SANITIZE_THREAD__) && !defined(__SANITIZE_ADDRESS__)
#define REFUSES_THREADS
static std::atomic<bool> refusesThreads{false};

extern "C" int pthread_create(pthread_t* thread, const pthread_attr_t* attributes,
                              void* (*body)(void*), void* argument) noexcept {
  if (refusesThreads) return EAGAIN;
  static const auto next =
      reinterpret_cast<decltype(&pthread_create)>(::dlsym(RTLD_NEXT, "pthread_create"));
  return next(thread, attributes, body, argument);
}
#endif

namespace stress {
namespace {

/// A sender leaves as soon as its sends have ended: its receiver still gets everything.
void senderLeaves(Rank& me, const GroupOptions& options) {
  Random shared(41);
  Random own(42u + static_cast<unsigned>(me.rank));
  for (int round = 0; round < often(60); ++round) {
    const Engine engine = me.group(concat("leaves", round), options);
    const std::size_t sizes[] = {100, 2049, 65536, 200000, 262144, 1200000};
    std::vector<Letter> letters;
    for (std::size_t i = 0, n = 1 + drawBelow(shared, 3); i < n; ++i) {
      letters.push_back({0, 1, 0, sizes[drawBelow(shared, 6)], shared()});
    }
    auto& p2p = pointToPoint(*engine);
    // Both must have met, otherwise the receiver may never find the sender.
    const auto hello = begin(p2p, {1, 0, 7, 8, 3}, me.rank == 1);
    const auto back = begin(p2p, {0, 1, 7, 8, 3}, me.rank == 0);
    REQUIRE(p2p.wait(hello, TimePoint::max()) && p2p.wait(back, TimePoint::max()));
    if (me.rank == 1) loiter(own, 3000);
    for (const auto& transfer : post(me, p2p, letters, own)) {
      p2p.wait(transfer, TimePoint::max());
      transfer->check();
    }
    engine->shutdown();
  }
}

/// A rank aborts while letters are in progress: each letter ends with the right bytes, or fails.
void abortStorm(Rank& me, const GroupOptions& options) {
  for (int round = 0; round < often(25); ++round) {
    Random shared(51u + static_cast<unsigned>(round));
    Random own(52u + static_cast<unsigned>(me.rank * 1000 + round));
    const Engine engine = me.group(concat("p2pstorm", round), options);
    const auto letters = drawLetters(shared, me.size, 20 * me.size);
    const int culprit = static_cast<int>(drawBelow(shared, static_cast<std::size_t>(me.size)));
    const std::size_t after = drawBelow(shared, 3000);
    auto& p2p = pointToPoint(*engine);
    // A rank that aborts before it has met any other rank cannot notify any.
    runChecked(me, *engine, Plan{});
    me.sync();
    std::jthread killer;
    if (me.rank == culprit) killer = abortAfter(engine, after, "the storm");
    for (const auto& transfer : post(me, p2p, letters, own, arenaOf(*engine))) {
      REQUIRE(p2p.wait(transfer, Clock::now() + Milliseconds(20000)), "a letter never ended");
      if (!transfer->fault()) transfer->verify();
      // A sender may overwrite the buffer of a failed send at once. A receiver discards what it
      // then reads, but between threads that is formally a data race.
      if (me.process && transfer->fault() && transfer->send) transfer->spoil();
    }
    if (killer.joinable()) killer.join();
    if (chance(own, 2)) engine->shutdown();
  }
}

/// The receiver does not arrive: the sender times out, and both ranks report it.
void lateReceiver(Rank& me, const GroupOptions& options) {
  const Engine engine = me.group("late", options);
  auto& p2p = pointToPoint(*engine);
  if (me.rank == 1) me.sync();
  const auto transfer =
      std::make_shared<Transfer>(Letter{0, 1, 0, 1000000, 1}, me.rank == 0, Milliseconds(300));
  requireFault({"Timed out after 300 ms"}, [&] {
    p2p.submit(transfer);
    p2p.wait(transfer, TimePoint::max());
    transfer->check();
  });
  if (me.rank == 0) me.sync();
}

/// A sender dies at a random moment with messages in progress: all received data is right.
void senderDies(Rank& me) {
  const Engine engine = me.group("dies");
  auto& p2p = pointToPoint(*engine);
  Random own(static_cast<unsigned>(Clock::now().time_since_epoch().count()));
  runChecked(me, *engine, Plan{});
  const auto arena = arenaOf(*engine);
  if (me.rank == 0) {
    const auto after = std::chrono::microseconds(drawBelow(own, 30000));
    std::thread([after] {
      std::this_thread::sleep_for(after);
      ::raise(SIGKILL);
    }).detach();
  }
  const auto end = Clock::now() + Milliseconds(20000);
  for (std::uint64_t i = 0;; ++i) {
    REQUIRE(Clock::now() < end, "the group outlived its rank");
    const Letter letter{0, 1, 0, i % 3 == 0 ? 100000u : 5000000u, i * 64};
    const auto transfer = begin(p2p, letter, me.rank == 0, i % 2 == 0 ? arena : nullptr);
    p2p.wait(transfer, TimePoint::max());
    if (!transfer->fault()) {
      transfer->verify();
      continue;
    }
    try {
      transfer->check();
    } catch (const Error& error) {
      const std::string text = error.what();
      REQUIRE(text.find("process died") != std::string::npos, text);
      return;
    }
  }
}

#ifdef REFUSES_THREADS
/// No thread can be started for a while. The message proceeds when one can be.
void noThread(Rank& me) {
  const Engine engine = me.group("no thread", onHosts("alone", me));
  auto& p2p = pointToPoint(*engine);
  drainWorkers();
  me.sync();
  refusesThreads = true;
  const auto transfer = begin(p2p, {0, 1, 0, 500000, 9}, me.rank == 0);
  const bool ended = p2p.wait(transfer, Clock::now() + Milliseconds(300));
  me.sync();
  refusesThreads = false;
  REQUIRE(!ended, "a message ended without a connection");
  REQUIRE(p2p.wait(transfer, Clock::now() + Milliseconds(20000)));
  transfer->check();
}
#endif

}  // namespace

std::vector<Test> pointToPointFaultTests() {
  return {{"sender leaves", here(senderLeaves), {2}},
          {"point-to-point abort storm", here(abortStorm), {2, 4}},
          {"late receiver", here(lateReceiver), {2}},
          {"hosts: sender leaves", apart(senderLeaves, "alone"), {2}, false},
          {"hosts: point-to-point abort storm", apart(abortStorm, "two in turns"), {2, 4}, false},
          {"hosts: late receiver", apart(lateReceiver, "alone"), {2}, false},
#ifdef REFUSES_THREADS
          {"hosts: no thread can be started", noThread, {2}, false},
#endif
          {"sender dies", senderDies, {2}, true, 0, false}};
}

}  // namespace stress
