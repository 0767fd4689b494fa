#include "cuda/watch_threads.hpp"

#include <pthread.h>

#include <algorithm>
#include <condition_variable>
#include <cstdint>
#include <memory>
#include <mutex>
#include <vector>

#include "base/thread.hpp"
#include "base/weak_registry.hpp"
#include "cuda/capture.hpp"
#include "cuda/watchdog.hpp"

namespace fastcoll {
namespace {

constexpr Milliseconds kSecond{1000};
// How long the first thread may use one group before it counts as blocked.
constexpr Milliseconds kStall{5000};

struct Watch {
  struct Thread {
    bool running = false;
    std::condition_variable wake;
    const Watchdog* at = nullptr;  // the group that it uses now
    TimePoint since;               // since when
  };
  std::mutex mutex;  // taken after a Watchdog's; not held while a Watchdog is called
  std::vector<std::shared_ptr<Watchdog>> groups;
  bool woken = false;
  Thread calls;
  Thread store;
  std::condition_variable left;
};

Watch& watch() {
  return perProcess<Watch>();
}

/// Calls `use` without the lock for each group that is still watched.
template <typename Use>
void forEach(Watch& all, Watch::Thread& thread, std::unique_lock<std::mutex>& lock, Use use) {
  auto round = all.groups;
  for (const auto& group : round) {
    if (std::find(all.groups.begin(), all.groups.end(), group) == all.groups.end()) continue;
    thread.at = group.get();
    thread.since = Clock::now();
    lock.unlock();
    use(*group);
    lock.lock();
    thread.at = nullptr;
    all.left.notify_all();
  }
  lock.unlock();
  round.clear();  // may end a group, whose store may need the GIL
  lock.lock();
}

void pollCalls(Watch& all) {
  ::pthread_setname_np(::pthread_self(), "fastcoll-dog");
  const RelaxedCapture relaxed;
  std::unique_lock<std::mutex> lock(all.mutex);
  while (!all.groups.empty()) {
    all.woken = false;
    Milliseconds rest = kSecond;
    forEach(all, all.calls, lock, [&](Watchdog& group) { rest = std::min(rest, group.turn()); });
    all.calls.wake.wait_for(lock, rest, [&] { return all.woken; });
  }
  all.calls.running = false;
}

void pollStore(Watch& all) {
  ::pthread_setname_np(::pthread_self(), "fastcoll-news");
  std::unique_lock<std::mutex> lock(all.mutex);
  for (std::uint64_t second = 1; !all.groups.empty(); ++second) {
    const bool blocked = all.calls.at != nullptr && Clock::now() > all.calls.since + kStall;
    forEach(all, all.store, lock, [&](Watchdog& group) { group.check(blocked); });
    forEach(all, all.store, lock, [&](Watchdog& group) { group.readFaults(second); });
    all.store.wake.wait_for(lock, kSecond, [&] { return all.groups.empty(); });
  }
  all.store.running = false;
}

void start(Watch& all, Watch::Thread& thread, void (*body)(Watch&)) {
  if (thread.running) return;
  startThread([&all, body] { body(all); }).detach();
  thread.running = true;
}

}  // namespace

void startWatching(const std::shared_ptr<Watchdog>& group) {
  Watch& all = watch();
  const std::lock_guard<std::mutex> lock(all.mutex);
  all.groups.push_back(group);
  try {
    start(all, all.calls, pollCalls);
    start(all, all.store, pollStore);
  } catch (...) {
    all.groups.pop_back();
    throw;
  }
}

void wakeWatching() {
  Watch& all = watch();
  const std::lock_guard<std::mutex> lock(all.mutex);
  all.woken = true;
  all.calls.wake.notify_all();
}

void stopWatching(const std::shared_ptr<Watchdog>& group, Milliseconds grace) noexcept {
  Watch& all = watch();
  std::unique_lock<std::mutex> lock(all.mutex);
  std::erase(all.groups, group);
  all.woken = true;
  all.calls.wake.notify_all();
  all.store.wake.notify_all();
  all.left.wait_for(lock, grace,
                    [&] { return all.calls.at != group.get() && all.store.at != group.get(); });
}

}  // namespace fastcoll
