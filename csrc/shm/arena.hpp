// The only shared memory of a process: a sealed memfd without a name, mapped once by its owner and
// once by each peer. Control blocks, rings and tensors are extents of it, so a group needs no
// descriptor. Nothing can be left behind, because the memory lives only as long as a mapping.
//
// The file's size is address space, not memory. An extent is reserved with fallocate before it is
// handed out. So a full machine is an error here and never a SIGBUS later. The limit of a memory
// cgroup is no error: there the kernel kills a process. Because of the seals (SHRINK, GROW), a
// broken peer cannot truncate the file.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <iterator>
#include <map>
#include <memory>
#include <mutex>
#include <optional>

#include "base/clock.hpp"
#include "base/topology.hpp"

namespace fastcoll {

constexpr std::size_t kPage = 4096;
inline std::size_t roundToPage(std::size_t bytes) {
  return (bytes + kPage - 1) / kPage * kPage;
}
constexpr std::size_t kHugePage = std::size_t{2} << 20;
constexpr std::uint64_t kArenaMagic = 0x314c4c4f43545346ull;  // "FSTCOLL1"
constexpr std::uint32_t kAbiVersion =
    17;  // layout of shared memory, of network frames, and of records in the store

constexpr std::uint32_t kOwnerDied = 0x40000000;  // FUTEX_OWNER_DIED

/// A directory entry holds the offset of a group instance's control block.
/// nonce: 0 = empty, written last (release). The offset is valid if the nonce matches. The instance
/// has left its group when the nonce differs: unlike the control block, an entry is never freed.
struct DirectoryEntry {
  std::atomic<std::uint64_t> nonce;
  std::atomic<std::uint64_t> offset;
};

/// Rung after any change that a rank's point-to-point must handle; on a fault or close too. It is
/// in the header, not in a control block, because a peer may ring it after the group's memory is
/// freed.
struct alignas(64) Doorbell {
  std::atomic<std::uint64_t> rings;
  std::atomic<std::uint32_t>
      waiters;  // threads of the owner that sleep on `rings`, or are about to
};

struct ArenaHeader {
  std::uint64_t magic;
  std::uint32_t abi;
  std::uint32_t pid;  // in the owner's pid namespace; for error texts and the process state
  Nonce128 nonce;
  std::uint64_t bytes;
  std::uint64_t pidNamespace;  // of the owner
  /// Thread id of the owner's keeper thread; the kernel ORs in FUTEX_OWNER_DIED when it dies.
  alignas(64) std::atomic<std::uint32_t> life;
  /// 1 after a clean leave; distinguishes an exit from a crash.
  std::atomic<std::uint32_t> bye;
  char host[64];
  /// Groups share them: a ring that was meant for another one wakes a sleeper in vain.
  Doorbell doorbells[32];

  /// The doorbell of the owner's group instance with this nonce.
  Doorbell& doorbell(std::uint64_t instance) { return doorbells[instance % std::size(doorbells)]; }

  static constexpr std::size_t kDirectoryOffset = kPage;
  static constexpr std::size_t kDirectoryEntries = 4096;
  static constexpr std::size_t kBytes = kPage + kDirectoryEntries * sizeof(DirectoryEntry);
};
static_assert(sizeof(ArenaHeader) <= kPage);
static_assert(std::atomic<std::uint64_t>::is_always_lock_free);

/// Entry of `nonce` in the directory of a mapped arena, or nullptr.
const DirectoryEntry* findInDirectory(std::uint8_t* base, std::uint64_t nonce);

/// Maps shared memory aligned for huge pages; MAP_FAILED and errno if it fails.
void* mapShared(int fd, std::size_t bytes);

class Arena {
 public:
  /// Reserves `virtualBytes` of address space (halved until the system grants it, at least 64 MiB).
  /// Throws Error(Backend) with the failed call and a remedy.
  static std::shared_ptr<Arena> create(std::size_t virtualBytes);
  ~Arena();

  std::uint8_t* base() const { return base_; }
  /// Offset of [data, data + bytes), or 0 if it does not lie in this arena or was withdrawn.
  std::uint64_t offsetOf(const void* data, std::size_t bytes) const;
  std::size_t bytes() const { return bytes_; }
  int descriptor() const { return fd_; }
  ArenaHeader* header() const { return reinterpret_cast<ArenaHeader*>(base_); }

  /// Reserves zeroed memory; returns its offset, a multiple of the page size. Extents of at least
  /// kHugePage use huge pages if the kernel has some. They reduce TLB misses, which take long in a
  /// virtual machine.
  std::uint64_t allocate(std::size_t bytes) { return allocateFrom(0, bytes); }
  /// The same for a tensor, but outside the arena's first eighth. So tensors never take the room
  /// that groups need, nor memory where a stopped peer may still decrement a waiters' count.
  std::uint64_t allocateTensor(std::size_t bytes) { return allocateFrom(bytes_ / 8, bytes); }
  /// Returns the extent's memory to the system at once.
  void release(std::uint64_t offset) noexcept;
  /// The same for an extent that a peer may still read, or in which it may still increment a
  /// waiters' count. The memory keeps its contents and is not reused for a second.
  void retire(std::uint64_t offset) noexcept;
  /// Moves the extents of [data, data + bytes) out of shared memory. Addresses and contents stay;
  /// later writes of peers have no effect here. The extents' offsets are never reused, because a
  /// stopped peer may wake up at any time. Returns false if memory is lacking.
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
  std::map<std::uint64_t, Extent> extents_;  // by offset: handed out, retired or gone
  std::atomic<bool> hasWithdrawn_{false};
};

/// Maps reserved pages of shared memory at once. A page fault for each of them, during the first
/// messages, takes many times longer. Best effort.
void mapNow(std::uint8_t* data, std::size_t bytes) noexcept;

}  // namespace fastcoll
