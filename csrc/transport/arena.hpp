// The one piece of shared memory of a process ("outbox"): a sealed memfd without a name, mapped
// once by its owner and once by each peer. Groups, slots and tensors are extents carved from it, so
// that a group costs no descriptor, and nothing can be left behind: the memory lives as long as a
// mapping.
//
// The file's size is address space, not memory: an extent is reserved with fallocate before it is
// handed out, so that a full machine is an error here and never a SIGBUS later. The seals (SHRINK,
// GROW) keep a broken peer from cutting the file under us.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <optional>

#include "../base/clock.hpp"
#include "../base/topology.hpp"

namespace fastcoll {

constexpr std::size_t kPage = 4096;
inline std::size_t roundToPage(std::size_t bytes) {
  return (bytes + kPage - 1) / kPage * kPage;
}
constexpr std::size_t kHugePage = std::size_t{2} << 20;
constexpr std::uint64_t kArenaMagic = 0x314c4c4f43545346ull;  // "FSTCOLL1"
constexpr std::uint32_t kAbiVersion =
    6;  // layout of shared memory, of frames, and of what is in the store

constexpr std::uint32_t kOwnerDied = 0x40000000;  // FUTEX_OWNER_DIED

/// A directory entry tells where the control block of a group instance lies.
/// nonce: 0 = empty, written last (release); offset is valid when the nonce matches.
struct DirectoryEntry {
  std::atomic<std::uint64_t> nonce;
  std::atomic<std::uint64_t> offset;
};

struct ArenaHeader {
  std::uint64_t magic;
  std::uint32_t abi;
  std::uint32_t pid;  // as its owner sees it; for messages only
  Nonce128 nonce;
  std::uint64_t bytes;
  /// Thread id of the owner's keeper thread; the kernel ORs FUTEX_OWNER_DIED when it dies.
  alignas(64) std::atomic<std::uint32_t> life;
  /// 1 after a clean leave, so that an exit is told from a crash.
  std::atomic<std::uint32_t> bye;
  char host[64];

  static constexpr std::size_t kDirectoryOffset = kPage;
  static constexpr std::size_t kDirectoryEntries = 4096;
  static constexpr std::size_t kBytes = kPage + kDirectoryEntries * sizeof(DirectoryEntry);
};
static_assert(sizeof(ArenaHeader) <= kPage);
static_assert(std::atomic<std::uint64_t>::is_always_lock_free);

/// Entry of `nonce` in the directory of a mapped arena, or nullptr.
const DirectoryEntry* findInDirectory(const std::uint8_t* base, std::uint64_t nonce);

/// Maps shared memory where its huge pages can be mapped as such; MAP_FAILED and errno if it fails.
void* mapShared(int fd, std::size_t bytes);

class Arena {
 public:
  /// Reserves `virtualBytes` of address space (halved until the system grants it, at least 64 MiB).
  /// Throws Error(Backend) that says what failed and what to do.
  static std::shared_ptr<Arena> create(std::size_t virtualBytes);
  ~Arena();
  Arena(const Arena&) = delete;
  Arena& operator=(const Arena&) = delete;

  std::uint8_t* base() const { return base_; }
  /// Offset of [data, data + bytes), or 0 if that does not lie in this arena.
  std::uint64_t offsetOf(const void* data, std::size_t bytes) const;
  std::size_t bytes() const { return bytes_; }
  int descriptor() const { return fd_; }
  ArenaHeader* header() const { return reinterpret_cast<ArenaHeader*>(base_); }

  /// Reserves zeroed memory; returns its offset, a multiple of the page size. Extents of kHugePage
  /// and more lie in huge pages where the kernel has some: fewer misses of the TLB, which are dear
  /// in a virtual machine.
  std::uint64_t allocate(std::size_t bytes) { return allocateFrom(0, bytes); }
  /// The same for a tensor: not in the first eighth of the arena, so that tensors never take the
  /// room that groups need, nor a place in which a stopped peer may still count itself out.
  std::uint64_t allocateTensor(std::size_t bytes) { return allocateFrom(bytes_ / 8, bytes); }
  /// Gives the extent's memory back to the system at once.
  void release(std::uint64_t offset) noexcept;
  /// The same for an extent that peers know of: one may still look there, or add itself to a
  /// waiters' count. The memory is left as it is and not handed out again for a while.
  void retire(std::uint64_t offset) noexcept;
  /// Moves the extents of [data, data + bytes) out of shared memory: the addresses and the contents
  /// stay, and what peers write there from now on is not seen here. The extents' places are never
  /// handed out again, because a stopped peer may wake up at any time. False if memory is lacking.
  bool withdraw(const void* data, std::size_t bytes) noexcept;
  /// Bytes reserved now.
  std::size_t used() const;

  void addToDirectory(std::uint64_t nonce, std::uint64_t offset);
  void removeFromDirectory(std::uint64_t nonce) noexcept;

 private:
  Arena() = default;
  int fd_ = -1;
  std::uint8_t* base_ = nullptr;
  std::size_t bytes_ = 0;
  std::uint64_t forkGeneration_ = 0;
  mutable std::mutex mutex_;
  struct Extent {
    std::size_t bytes;
    std::optional<TimePoint> reusableFrom{};  // set when retired
    enum { Shared, Withdrawn, Gone } state = Shared;
  };
  std::uint64_t allocateFrom(std::uint64_t least, std::size_t bytes);
  void reserve(std::uint64_t offset, std::size_t bytes);
  void punch(std::uint64_t offset, std::size_t bytes) noexcept;
  void releaseRetired(TimePoint now) noexcept;
  std::map<std::uint64_t, Extent> extents_;  // by offset: those handed out, retired or gone
  std::atomic<bool> hasWithdrawn_{false};
};

/// Maps pages of shared memory at once, reserved ones: a fault for each, on the way of the first
/// messages, takes many times longer. Best effort.
void mapNow(std::uint8_t* data, std::size_t bytes) noexcept;

}  // namespace fastcoll
