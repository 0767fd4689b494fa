// What the host and the kernels between ranks tell each other of one region, in words of host
// memory that the device maps: neither needs a call of the driver, or Python's lock. The other side
// is kernels/_signals.py.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <utility>

namespace fastcoll {

class KernelWords {
 public:
  /// `memory` has the words, and keeps them as long as the pointer lives: one by which waits of
  /// kernels are ended, and one in which a kernel that gave up says of what. `prefix` is for
  /// messages, of a group of so many ranks.
  KernelWords(std::shared_ptr<std::int64_t> memory, std::string prefix, int size)
      : words_(std::move(memory)), prefix_(std::move(prefix)), size_(size) {}

  /// Ends waits, those to come too.
  void endWaits() noexcept { __atomic_store_n(words_.get(), 1, __ATOMIC_RELEASE); }
  /// What a kernel has given up to wait for, or "".
  std::string fault() const;

 private:
  std::shared_ptr<std::int64_t> words_;
  std::string prefix_;
  int size_;
};

}  // namespace fastcoll
