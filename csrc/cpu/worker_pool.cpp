#include "cpu/worker_pool.hpp"

#include <pthread.h>

#include <algorithm>
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
  bool draining = false;
};

thread_local bool onWorker = false;

void work(Pool& p) {
  onWorker = true;
  ::pthread_setname_np(::pthread_self(), "fastcoll-work");
  std::unique_lock<std::mutex> lock(p.mutex);
  for (;;) {
    ++p.idle;
    const bool job = p.wake.wait_for(lock, std::chrono::seconds(2), [&p] {
      return !p.jobs.empty() || p.draining || p.dismissed > 0;
    });
    --p.idle;
    if (p.jobs.empty()) {
      if (!job || p.draining) break;
      if (p.dismissed == 0) continue;
      --p.dismissed;
      break;
    }
    auto next = std::move(p.jobs.front());
    p.jobs.pop_front();
    lock.unlock();
    next();
    next = nullptr;
    lock.lock();
  }
  --p.threads;
  p.dismissed = std::min(p.dismissed, p.threads);
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
  std::unique_lock<std::mutex> lock(p.mutex);
  p.draining = true;
  p.wake.notify_all();
  p.left.wait_for(lock, std::chrono::seconds(1), [&p] { return p.threads == 0; });
  p.draining = false;
}

}  // namespace fastcoll
