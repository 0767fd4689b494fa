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
  std::vector<std::shared_ptr<Watchdog>> dogs;
  bool woken = false;
  Thread patrol;
  Thread news;
  std::condition_variable left;
};

Watch& watch() {
  static auto* all = new PerProcess<Watch>;  // outlives static destructors
  return all->get();
}

/// Calls `use` without the lock for each group that is still watched.
template <typename Use>
void forEach(Watch& all, Watch::Thread& thread, std::unique_lock<std::mutex>& lock, Use use) {
  auto round = all.dogs;
  for (const auto& dog : round) {
    if (std::find(all.dogs.begin(), all.dogs.end(), dog) == all.dogs.end()) continue;
    thread.at = dog.get();
    thread.since = Clock::now();
    lock.unlock();
    use(*dog);
    lock.lock();
    thread.at = nullptr;
    all.left.notify_all();
  }
  lock.unlock();
  round.clear();  // may end a group, whose store may need the GIL
  lock.lock();
}

void patrol(Watch& all) {
  ::pthread_setname_np(::pthread_self(), "fastcoll-dog");
  const RelaxedCapture relaxed;
  std::unique_lock<std::mutex> lock(all.mutex);
  while (!all.dogs.empty()) {
    all.woken = false;
    Milliseconds rest = kSecond;
    forEach(all, all.patrol, lock, [&](Watchdog& dog) { rest = std::min(rest, dog.turn()); });
    all.patrol.wake.wait_for(lock, rest, [&] { return all.woken; });
  }
  all.patrol.running = false;
}

void hearNews(Watch& all) {
  ::pthread_setname_np(::pthread_self(), "fastcoll-news");
  std::unique_lock<std::mutex> lock(all.mutex);
  for (std::uint64_t second = 1; !all.dogs.empty(); ++second) {
    const bool blocked = all.patrol.at != nullptr && Clock::now() > all.patrol.since + kStall;
    forEach(all, all.news, lock, [&](Watchdog& dog) { dog.check(blocked); });
    forEach(all, all.news, lock, [&](Watchdog& dog) { dog.hear(second); });
    all.news.wake.wait_for(lock, kSecond, [&] { return all.dogs.empty(); });
  }
  all.news.running = false;
}

void start(Watch& all, Watch::Thread& thread, void (*body)(Watch&)) {
  if (thread.running) return;
  startThread([&all, body] { body(all); }).detach();
  thread.running = true;
}

}  // namespace

void startWatching(const std::shared_ptr<Watchdog>& dog) {
  Watch& all = watch();
  const std::lock_guard<std::mutex> lock(all.mutex);
  all.dogs.push_back(dog);
  try {
    start(all, all.patrol, patrol);
    start(all, all.news, hearNews);
  } catch (...) {
    all.dogs.pop_back();
    throw;
  }
}

void wakeWatching() {
  Watch& all = watch();
  const std::lock_guard<std::mutex> lock(all.mutex);
  all.woken = true;
  all.patrol.wake.notify_all();
}

void stopWatching(const std::shared_ptr<Watchdog>& dog, Milliseconds grace) noexcept {
  Watch& all = watch();
  std::unique_lock<std::mutex> lock(all.mutex);
  std::erase(all.dogs, dog);
  all.woken = true;
  all.patrol.wake.notify_all();
  all.news.wake.notify_all();
  all.left.wait_for(lock, grace,
                    [&] { return all.patrol.at != dog.get() && all.news.at != dog.get(); });
}

}  // namespace fastcoll
