// torch's allocator of CPU memory while FASTCOLL_SHARED_TENSORS=1 or Options.shared_tensors is on.
// Tensors of kLeastBytes and more lie in this process's shared arena, where peers read and reduce
// them in place, like those of allocate_tensor. Models and scripts do not change.
//
// A tensor that cannot have shared memory (none is left, a forked child, no group) has ordinary
// memory, and is copied into the rings again. Blocks that torch frees are kept for later tensors,
// because making shared pages is slow. Blocks in use and kept together exceed the most that was in
// use at once by at most a quarter plus kKeptBytes.
//
// A forked child sees its parent's blocks. In the child they become private mappings, so it never
// writes to another process's tensors. The parent neither reuses nor empties a block that was in
// use at the fork before the child has ended (Forks). The child sees the parent's writes to a
// tensor that the parent still has, until the child itself has written to that page.
#pragma once

#include <c10/core/Allocator.h>

#include <atomic>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <unordered_map>
#include <vector>

#include "shm/process.hpp"

namespace fastcoll {

/// Tracks the forked children that may still read this process's memory. Each fork leaves a pipe
/// whose writing end only its children have: at its end of file all of them have ended.
class Forks {
 public:
  /// Number of the latest fork, from 1.
  std::uint64_t latest() const { return latest_; }
  /// Called in the parent before and after a fork, and in the child after it.
  void prepare() noexcept;
  void parent() noexcept;
  void child() noexcept;
  /// Whether a child of a fork after number `after`, up to number `last`, may be alive.
  bool alive(std::uint64_t after, std::uint64_t last) const;
  /// Forgets forks whose children have ended.
  void reap() noexcept;

 private:
  struct Fork {
    std::uint64_t number;
    int reader;  // -1: no pipe could be made, so the fork is never forgotten
  };
  std::uint64_t latest_ = 0;
  int ends_[2] = {-1, -1};
  std::vector<Fork> forks_;
};

class SharedAllocator : public c10::Allocator {
 public:
  /// Smaller messages gain nothing from shared memory.
  static constexpr std::size_t kLeastBytes = 32 * 1024;

  /// Makes it torch's allocator to the end of the process, with the arena of `process` while that
  /// lives.
  static void install(const std::shared_ptr<LocalProcess>& process, std::size_t arenaBytes);
  /// Returns kept blocks to the system, after the end of the last group.
  static void trim() noexcept;

  c10::DataPtr allocate(std::size_t bytes) override;
  c10::DeleterFnPtr raw_deleter() const override;
  void copy_data(void* to, const void* from, std::size_t bytes) const override;

 private:
  struct Block {
    std::shared_ptr<Arena> arena;
    std::uint64_t offset = 0;
    std::size_t bytes = 0;
    std::uint64_t after = 0;  // the latest fork when it was handed out
    std::uint64_t last = 0;   // the latest fork when it came back
  };
  /// Addresses of an arena. Never forgotten, because a child may free its parent's tensors.
  struct Range {
    std::uintptr_t first;
    std::uintptr_t end;
    Range* next;
  };
  SharedAllocator();
  static void deleteBlock(void* data);
  static void deleteAny(void* data);
  static void beforeFork() noexcept;
  static void afterForkInParent() noexcept;
  static void afterForkInChild() noexcept;
  static bool inArena(const void* data);
  bool ours() const;
  void* take(std::size_t bytes);
  Block newBlock(const std::shared_ptr<Arena>& arena, std::size_t bytes);
  Block reserve(const std::shared_ptr<Arena>& arena, std::size_t bytes);
  void give(void* data) noexcept;
  void giveBack(Block block, const std::shared_ptr<LocalProcess>& process) noexcept;
  void releaseKept(std::size_t most) noexcept;
  void releaseHeld(const std::shared_ptr<LocalProcess>& process) noexcept;

  /// In a forked child, ours() is false until it installs its own.
  static std::atomic<SharedAllocator*> current_;
  static std::atomic<Range*> ranges_;
  const std::uint64_t forkGeneration_;
  std::mutex mutex_;  // taken before those of LocalProcess and Arena
  std::weak_ptr<LocalProcess> process_;
  std::size_t arenaBytes_ = 0;
  bool warned_ = false;
  std::unordered_map<void*, Block> blocks_;  // in use
  std::multimap<std::size_t, Block> kept_;   // by size, all of one arena
  std::vector<Block> held_;                  // until children that may see them have ended
  std::size_t usedBytes_ = 0;
  std::size_t keptBytes_ = 0;
  std::size_t mostUsedBytes_ = 0;
  Forks forks_;
};

}  // namespace fastcoll
