#include "cpu/abort_hooks.hpp"

#include <exception>
#include <utility>

#include "base/entry_lock.hpp"
#include "base/error.hpp"
#include "base/log.hpp"
#include "base/worker_pool.hpp"

namespace fastcoll {

void AbortHooks::add(std::int64_t id, Hook hook) {
  const std::lock_guard<std::mutex> lock(mutex_);
  if (phase_ == Phase::Waiting) std::swap(hooks_[id], hook);
}

void AbortHooks::remove(std::int64_t id) {
  decltype(hooks_)::node_type removed;
  const std::lock_guard<std::mutex> lock(mutex_);
  removed = hooks_.extract(id);
}

void AbortHooks::clear() {
  decltype(hooks_) removed;
  const std::lock_guard<std::mutex> lock(mutex_);
  removed.swap(hooks_);
}

void AbortHooks::call() noexcept {
  beforeWait();
  std::unique_lock<std::mutex> lock(mutex_);
  if (phase_ == Phase::Running && runner_ != std::this_thread::get_id()) {
    awaitEnd(lock, std::chrono::seconds(10));
  }
  if (phase_ != Phase::Waiting) return;
  phase_ = Phase::Running;
  runner_ = std::this_thread::get_id();
  const auto hooks = std::exchange(hooks_, {});
  lock.unlock();
  for (const auto& [id, hook] : hooks) {
    try {
      hook();
    } catch (const std::exception& error) {
      log(LogLevel::Warn, "abort hook ", id, " failed: ", error.what());
    } catch (...) {
      log(LogLevel::Warn, "abort hook ", id, " failed");
    }
  }
  lock.lock();
  phase_ = Phase::Done;
  ended_.notify_all();
  lock.unlock();
}

void AbortHooks::callElsewhere() noexcept {
  std::unique_lock<std::mutex> lock(mutex_);
  if (phase_ == Phase::Done || (phase_ == Phase::Waiting && hooks_.empty())) return;
  try {
    runOnWorker([self = shared_from_this()] { self->call(); });
  } catch (const std::exception& error) {
    return log(LogLevel::Warn, "no thread could be started for abort hooks: ", error.what(),
               kMoreThreads);
  }
  awaitEnd(lock, std::chrono::seconds(2));
}

void AbortHooks::awaitEnd(std::unique_lock<std::mutex>& lock, std::chrono::seconds most) {
  ended_.wait_for(lock, most, [this] { return phase_ == Phase::Done; });
}

}  // namespace fastcoll
