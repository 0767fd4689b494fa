// The only thread of the trace, started if faults are dumped: it polls for groups of this process
// that have failed, even if the main thread hangs or another thread holds the interpreter.
#include <pthread.h>

#include <condition_variable>
#include <cstdint>
#include <functional>
#include <map>
#include <mutex>
#include <thread>
#include <vector>

#include "base/clock.hpp"
#include "base/error.hpp"
#include "base/log.hpp"
#include "base/thread.hpp"
#include "base/weak_registry.hpp"
#include "trace/recorder.hpp"

namespace fastcoll::trace {
namespace {

constexpr Milliseconds kBetween{100};

struct Watching {
  std::mutex mutex;
  std::condition_variable changed;
  bool ends = false;
  std::thread thread;

  std::mutex groupsMutex;  // held while they are polled
  std::map<const void*, std::function<std::uint32_t()>> groups;
};

void poll(Watching& it) {
  std::vector<std::uint32_t> failed;
  {
    const std::lock_guard<std::mutex> lock(it.groupsMutex);
    for (const auto& [owner, group] : it.groups) failed.push_back(group());
  }
  for (const auto group : failed) groupFailed(group);  // writes a file, hence no lock
}

void pollUntilTheEnd(Watching& it) {
  ::pthread_setname_np(::pthread_self(), "fastcoll-trace");
  std::unique_lock<std::mutex> lock(it.mutex);
  bool ends = false;
  while (!ends) {
    ends = it.changed.wait_for(lock, kBetween, [&] { return it.ends; });
    lock.unlock();
    poll(it);
    lock.lock();
  }
}

}  // namespace

void watch(const void* owner, std::function<std::uint32_t()> failed) {
  if (!isWatching()) return;
  auto& it = perProcess<Watching>();
  const std::lock_guard<std::mutex> lock(it.groupsMutex);
  it.groups.emplace(owner, std::move(failed));
}

void unwatch(const void* owner) {
  auto& it = perProcess<Watching>();
  const std::lock_guard<std::mutex> lock(it.groupsMutex);
  it.groups.erase(owner);
}

void startWatcher() {
  auto& it = perProcess<Watching>();
  try {
    it.thread = startThread([&it] { pollUntilTheEnd(it); });
  } catch (const std::exception&) {
    log(LogLevel::Warn,
        "no thread could be started for the trace, so a fault of another rank writes no dump",
        kMoreThreads);
  }
}

void stopWatching() noexcept {
  auto& it = perProcess<Watching>();
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
