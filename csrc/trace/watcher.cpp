// The only thread of the trace, started if faults are dumped: it polls for groups of this process
// that have failed, even if the main thread hangs or another thread holds the interpreter.
#include <pthread.h>

#include <condition_variable>
#include <mutex>
#include <thread>

#include "base/clock.hpp"
#include "base/error.hpp"
#include "base/log.hpp"
#include "base/thread.hpp"
#include "base/weak_registry.hpp"
#include "trace/recorder.hpp"

namespace fastcoll::trace {
namespace {

constexpr Milliseconds kBetween{100};

std::atomic<void (*)()> poller{nullptr};

struct Watching {
  std::mutex mutex;
  std::condition_variable changed;
  bool ends = false;
  std::thread thread;
};

Watching& watching() {
  static auto* it = new PerProcess<Watching>;
  return it->get();
}

void watch(Watching& it) {
  ::pthread_setname_np(::pthread_self(), "fastcoll-trace");
  std::unique_lock<std::mutex> lock(it.mutex);
  bool ends = false;
  while (!ends) {
    ends = it.changed.wait_for(lock, kBetween, [&] { return it.ends; });
    lock.unlock();
    if (const auto poll = poller.load()) poll();
    lock.lock();
  }
}

}  // namespace

void setPoll(void (*poll)()) {
  poller.store(poll);
}

void startWatcher() {
  Watching& it = watching();
  try {
    it.thread = startThread([&it] { watch(it); });
  } catch (const std::exception&) {
    log(LogLevel::Warn,
        "no thread could be started for the trace, so a fault of another rank writes no dump",
        kMoreThreads);
  }
}

void stopWatching() noexcept {
  Watching& it = watching();
  std::thread ended;
  {
    const std::lock_guard<std::mutex> lock(it.mutex);
    it.ends = true;
    ended.swap(it.thread);
  }
  it.changed.notify_all();
  if (ended.joinable()) ended.join();
}

}  // namespace fastcoll::trace
