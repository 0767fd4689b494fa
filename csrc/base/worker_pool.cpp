#include "base/worker_pool.hpp"

#include <pthread.h>

#include <chrono>
#include <condition_variable>
#include <deque>
#include <mutex>

#include "base/thread.hpp"
#include "base/weak_registry.hpp"

namespace fastcoll {
namespace {

struct Pool {
  std::mutex mutex;
  std::condition_variable wake;
  std::condition_variable left;
  std::deque<std::function<void()>> jobs;
  std::size_t idle = 0;
  std::size_t threads = 0;
  std::size_t dismissed = 0;  // threads that end as soon as they are idle
};

thread_local bool onWorker = false;

void work(Pool& p) {
  onWorker = true;
  ::pthread_setname_np(::pthread_self(), "fastcoll-work");
  std::unique_lock<std::mutex> lock(p.mutex);
  for (;;) {
    ++p.idle;
    p.wake.wait_for(lock, std::chrono::seconds(2),
                    [&p] { return !p.jobs.empty() || p.dismissed > 0; });
    --p.idle;
    if (p.jobs.empty()) break;
    auto next = std::move(p.jobs.front());
    p.jobs.pop_front();
    lock.unlock();
    next();
    next = nullptr;
    lock.lock();
  }
  --p.threads;
  if (p.dismissed > 0) --p.dismissed;
  p.left.notify_all();
}

}  // namespace

void runOnWorker(std::function<void()> job) {
  auto& p = perProcess<Pool>();
  std::lock_guard<std::mutex> lock(p.mutex);
  p.jobs.push_back(std::move(job));
  if (p.idle >= p.jobs.size()) {
    p.wake.notify_one();
    return;
  }
  try {
    startThread([&p] { work(p); }).detach();
  } catch (...) {
    if (p.threads == 0) p.jobs.pop_back();  // else a busy thread runs it later
    if (p.threads == 0) throw;
    return;
  }
  ++p.threads;
}

void dismissWorkers() noexcept {
  auto& p = perProcess<Pool>();
  const std::lock_guard<std::mutex> lock(p.mutex);
  p.dismissed = p.threads;
  p.wake.notify_all();
}

void drainWorkers() noexcept {
  if (onWorker) return;  // a pooled thread would wait for itself
  auto& p = perProcess<Pool>();
  dismissWorkers();
  std::unique_lock<std::mutex> lock(p.mutex);
  p.left.wait_for(lock, std::chrono::seconds(1), [&p] { return p.threads == 0; });
}

}  // namespace fastcoll
