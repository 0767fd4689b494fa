#include "first_fault.hpp"

#include <condition_variable>
#include <exception>
#include <mutex>
#include <utility>

#include "worker_pool.hpp"

namespace fastcoll {
namespace {
constexpr int kFailures = 3;  // in a row, after which heard() no longer reads the store
}  // namespace

struct FirstFault::Shared {
  explicit Shared(std::shared_ptr<KeyValueStore> s) : store(std::move(s)) {}
  const std::shared_ptr<KeyValueStore> store;
  std::mutex mutex;
  std::condition_variable changed;
  std::optional<ToldFault> first;
  bool asking = false;
  bool telling = false;
  int failures = 0;
};

FirstFault::FirstFault(std::shared_ptr<KeyValueStore> store)
    : shared_(std::make_shared<Shared>(std::move(store))) {}

ToldFault FirstFault::tell(std::vector<std::string> keys, const ToldFault& fault,
                           Milliseconds patience) noexcept {
  try {
    std::unique_lock<std::mutex> lock(shared_->mutex);
    const auto known = shared_->first;
    if (keys.empty()) return known.value_or(fault);
    if (!shared_->telling) {
      // Write an already known fault, too: some rank may read only this rank's keys. If no thread
      // can be started, the next call tries again.
      runOnWorker([shared = shared_, keys = std::move(keys), fault = known.value_or(fault)] {
        std::optional<ToldFault> first;
        try {
          for (const std::string& key : keys) {
            ToldFault there = writeFault(*shared->store, key, first.value_or(fault));
            if (!first) first = std::move(there);
          }
        } catch (const std::exception&) {  // without the store each rank detects the fault itself
        }
        const std::lock_guard<std::mutex> again(shared->mutex);
        if (!shared->first) shared->first = first.value_or(fault);
        shared->changed.notify_all();
      });
      shared_->telling = true;
    }
    shared_->changed.wait_for(lock, patience, [this] { return shared_->first.has_value(); });
    return shared_->first.value_or(fault);
  } catch (const std::exception&) {  // no thread, no memory
    return fault;
  }
}

std::optional<ToldFault> FirstFault::heard(const std::string& key, Milliseconds patience) noexcept {
  try {
    std::unique_lock<std::mutex> lock(shared_->mutex);
    if (shared_->first) return shared_->first;
    if (!shared_->asking && shared_->failures < kFailures) {
      runOnWorker([shared = shared_, key] {
        std::optional<ToldFault> found;
        bool failed = false;
        try {
          found = readFault(*shared->store, key);
        } catch (const std::exception&) {
          failed = true;
        }
        const std::lock_guard<std::mutex> again(shared->mutex);
        shared->asking = false;
        shared->failures = failed ? shared->failures + 1 : 0;
        if (found && !shared->first) shared->first = std::move(found);
        shared->changed.notify_all();
      });
      shared_->asking = true;  // under the lock that the job takes at its end
    }
    shared_->changed.wait_for(lock, patience, [this] { return !shared_->asking; });
    return shared_->first;
  } catch (const std::exception&) {
    return std::nullopt;
  }
}

}  // namespace fastcoll
