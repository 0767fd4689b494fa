// torch's allocator of CPU memory, while FASTCOLL_SHARED_TENSORS=1 or Options.shared_tensors is on:
// tensors of kLeastBytes and more lie in this process's shared arena, where peers read and reduce
// them in place, as those of allocate_tensor. Nothing of a model or a script changes.
//
// A tensor that cannot have shared memory (none is left, a forked child, no group) has ordinary
// memory: only the copies into the rings are back. Blocks that torch frees are kept for tensors to
// come, for shared pages are dear to make; blocks in use and kept together never exceed by more
// than a quarter what was in use at once.
#pragma once

#include <c10/core/Allocator.h>

#include <atomic>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <unordered_map>

#include "transport/process.hpp"

namespace fastcoll {

class SharedAllocator : public c10::Allocator {
 public:
  /// Smaller messages gain nothing by being shared.
  static constexpr std::size_t kLeastBytes = 32 * 1024;

  /// Makes it torch's allocator, from now to the end of the process, with the arena of `process`
  /// while that lives.
  static void install(const std::shared_ptr<LocalProcess>& process, std::size_t arenaBytes);
  /// Gives kept blocks back to the system: the last group is gone.
  static void trim() noexcept;

  c10::DataPtr allocate(std::size_t bytes) override;
  c10::DeleterFnPtr raw_deleter() const override;
  void copy_data(void* to, const void* from, std::size_t bytes) const override;

 private:
  struct Block {
    std::shared_ptr<Arena> arena;
    std::uint64_t offset;
    std::size_t bytes;
  };
  SharedAllocator();
  static void deleteBlock(void* data);
  static void deleteAny(void* data);
  bool ours() const;
  std::shared_ptr<Arena> arena();
  void* take(std::size_t bytes);
  bool give(void* data) noexcept;
  void releaseKept(std::size_t most) noexcept;

  /// A forked child has none until it installs its own: its parent's lock may be held for ever.
  static std::atomic<SharedAllocator*> current_;
  const std::uint64_t forkGeneration_;
  std::mutex mutex_;
  std::weak_ptr<LocalProcess> process_;
  std::size_t arenaBytes_ = 0;
  bool warned_ = false;
  std::unordered_map<void*, Block> blocks_;  // in use
  std::multimap<std::size_t, Block> kept_;   // by size, all of one arena
  std::size_t usedBytes_ = 0;
  std::size_t keptBytes_ = 0;
  std::size_t mostUsedBytes_ = 0;
};

}  // namespace fastcoll
