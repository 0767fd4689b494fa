// Counts those who are somewhere at the moment.
#pragma once

#include <atomic>

namespace fastcoll {

/// One more while it lives. seq_cst: then looks at what others change before they look at the
/// count.
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
