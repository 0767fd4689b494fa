// Counts the threads that are inside a scope.
#pragma once

#include <atomic>

namespace fastcoll {

/// Adds one to the count while it lives. seq_cst: this thread counts itself before it reads what
/// others change; they change it before they read the count. So one of the two sees the other.
template <typename T>
class ScopedCount {
 public:
  explicit ScopedCount(std::atomic<T>& count) : count_(count) {
    count_.fetch_add(1, std::memory_order_seq_cst);
  }
  ~ScopedCount() { count_.fetch_sub(1, std::memory_order_relaxed); }
  ScopedCount(const ScopedCount&) = delete;
  ScopedCount& operator=(const ScopedCount&) = delete;

 private:
  std::atomic<T>& count_;
};

}  // namespace fastcoll
