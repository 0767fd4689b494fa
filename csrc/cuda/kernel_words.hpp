// Words of host memory through which the host and the kernels between ranks signal to each other,
// for one region. The device maps them, so neither side needs a driver call or the GIL. The device
// side is kernels/_signals.py.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <utility>

namespace fastcoll {

class KernelWords {
 public:
  /// `memory` owns two words. The first one ends the waits of kernels. In the second one, a kernel
  /// that timed out reports what it waited for. `prefix` begins the messages; `size`: ranks of the
  /// group.
  KernelWords(std::shared_ptr<std::int64_t> memory, std::string prefix, int size)
      : words_(std::move(memory)), prefix_(std::move(prefix)), size_(size) {}

  /// Ends all waits, current and future.
  void endWaits() noexcept { __atomic_store_n(words_.get(), 1, __ATOMIC_RELEASE); }
  /// What a kernel waited for in vain, or "".
  std::string fault() const;

 private:
  std::shared_ptr<std::int64_t> words_;
  std::string prefix_;
  int size_;
};

}  // namespace fastcoll
