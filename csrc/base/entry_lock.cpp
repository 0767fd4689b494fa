#include "base/entry_lock.hpp"

#include <utility>

namespace fastcoll {
namespace {
thread_local EntryLock* held = nullptr;
}  // namespace

EntryLock::EntryLock() : outer_(std::exchange(held, this)) {}

EntryLock::~EntryLock() {
  held = outer_;
}

void beforeWait() {
  if (held != nullptr && held->release()) held = nullptr;
}

std::unique_lock<std::mutex> lockAfterWait(std::mutex& mutex) {
  std::unique_lock<std::mutex> lock(mutex, std::try_to_lock);
  if (lock.owns_lock()) return lock;
  beforeWait();
  lock.lock();
  return lock;
}

}  // namespace fastcoll
