// Counts the threads that are inside a scope.
#pragma once

#include <atomic>

namespace fastcoll {

/// Adds one to the count while it lives. seq_cst: this thread counts itself before it reads what
/// others change; they change it before they read the count. So one of the two sees the other.
template <typename T>
class Counted {
 public:
  explicit Counted(std::atomic<T>& count) : count_(count) {
    count_.fetch_add(1, std::memory_order_seq_cst);
  }
  ~Counted() { count_.fetch_sub(1, std::memory_order_relaxed); }
  Counted(const Counted&) = delete;
  Counted& operator=(const Counted&) = delete;

 private:
  std::atomic<T>& count_;
};

}  // namespace fastcoll
