#include "base/fork.hpp"

#include <sys/mman.h>
#include <unistd.h>

#include <atomic>
#include <new>

namespace fastcoll {

// The kernel zeroes the page in a child (MADV_WIPEONFORK, Linux 4.14). So a check costs one load,
// not a getpid() system call. If madvise fails, the pid itself is the generation.
std::uint64_t forkGeneration() {
  static std::atomic<std::uint64_t>* const page = []() -> std::atomic<std::uint64_t>* {
    void* memory =
        ::mmap(nullptr, 4096, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (memory == MAP_FAILED) return nullptr;
    if (::madvise(memory, 4096, MADV_WIPEONFORK) != 0) {
      ::munmap(memory, 4096);
      return nullptr;
    }
    return new (memory) std::atomic<std::uint64_t>(0);
  }();
  if (page == nullptr) return static_cast<std::uint64_t>(::getpid());
  std::uint64_t value = page->load(std::memory_order_acquire);
  if (value == 0) {
    // Parent and child both start at zero; the pid makes their generations differ.
    std::uint64_t expected = 0;
    value = static_cast<std::uint64_t>(::getpid());
    if (!page->compare_exchange_strong(expected, value)) value = expected;
  }
  return value;
}

}  // namespace fastcoll
