// The lock that a thread holds when it enters the library: Python's GIL. The bindings define it, so
// C++ below does not depend on Python. A short call keeps it, because freeing it and taking it
// again costs as much as a small message. Code that may wait for another rank or thread, or work
// for long, calls beforeWait() first.
#pragma once

#include <cstddef>
#include <mutex>

#include "base/exported.hpp"

namespace fastcoll {

/// Work on at most so many bytes is short.
constexpr std::size_t kBriefBytes = 16384;

class EntryLock {
 public:
  /// From its construction to its end this is the calling thread's lock.
  EntryLock();
  virtual ~EntryLock();
  EntryLock(const EntryLock&) = delete;
  EntryLock& operator=(const EntryLock&) = delete;

  /// Frees the lock, which the destructor of the derived class takes again. False if the thread
  /// does not hold it now, because code that was called back has freed it for a while.
  virtual bool release() = 0;

 private:
  EntryLock* const outer_;
};

/// Frees the lock of this thread, if it holds one.
FASTCOLL_EXPORTED void beforeWait();

/// Locks a mutex whose holder may work for long, or wait for the lock of this thread.
std::unique_lock<std::mutex> lockAfterWait(std::mutex& mutex);

}  // namespace fastcoll
