#include "shm/arena.hpp"

#include <fcntl.h>
#include <linux/memfd.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>

#include "base/error.hpp"
#include "base/fork.hpp"

#ifndef MADV_COLLAPSE
#define MADV_COLLAPSE 25
#endif
#ifndef MFD_NOEXEC_SEAL
#define MFD_NOEXEC_SEAL 0x0008U
#endif

namespace fastcoll {
namespace {

int makeMemfd() {
  const unsigned flags = MFD_CLOEXEC | MFD_ALLOW_SEALING;
  int fd = static_cast<int>(::syscall(SYS_memfd_create, "fastcoll", flags | MFD_NOEXEC_SEAL));
  // Kernels before 6.3 reject MFD_NOEXEC_SEAL.
  if (fd < 0 && errno == EINVAL) {
    fd = static_cast<int>(::syscall(SYS_memfd_create, "fastcoll", flags));
  }
  return fd;
}

constexpr std::uint64_t kTombstone = ~std::uint64_t{0};

/// The first entry, from the place of `nonce` on, whose nonce is one of two. nullptr if an empty
/// entry comes before it, or all entries are others.
DirectoryEntry* entryOf(std::uint8_t* base, std::uint64_t nonce, std::uint64_t a, std::uint64_t b) {
  auto* const entries = reinterpret_cast<DirectoryEntry*>(base + ArenaHeader::kDirectoryOffset);
  for (std::size_t probe = 0; probe < ArenaHeader::kDirectoryEntries; ++probe) {
    DirectoryEntry& entry = entries[(nonce + probe) % ArenaHeader::kDirectoryEntries];
    const std::uint64_t found = entry.nonce.load(std::memory_order_acquire);
    if (found == a || found == b) return &entry;
    if (found == 0) return nullptr;
  }
  return nullptr;
}

// A peer sleeps for kWaitSlice at most. Before its next sleep it detects that the group has ended.
// ThreadSanitizer does not know an order by time, so with it retired memory is never reused.
#ifdef __SANITIZE_THREAD__
constexpr Milliseconds kRetirement{std::chrono::hours(1)};
#else
constexpr Milliseconds kRetirement{1000};
#endif

}  // namespace

void* mapShared(int fd, std::size_t bytes) {
  // Reserve address space with room for alignment, then unmap all but the aligned part.
  const std::size_t room = bytes + kHugePage;
  void* reserved =
      ::mmap(nullptr, room, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (reserved == MAP_FAILED) {
    return ::mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
  }
  const auto start = reinterpret_cast<std::uintptr_t>(reserved);
  const auto aligned = (start + kHugePage - 1) / kHugePage * kHugePage;
  void* mapped = ::mmap(reinterpret_cast<void*>(aligned), bytes, PROT_READ | PROT_WRITE,
                        MAP_SHARED | MAP_FIXED, fd, 0);
  if (mapped == MAP_FAILED) {
    const int error = errno;
    ::munmap(reserved, room);
    errno = error;
    return MAP_FAILED;
  }
  if (aligned > start) ::munmap(reserved, aligned - start);
  const std::uintptr_t end = aligned + roundToPage(bytes);
  if (start + room > end) ::munmap(reinterpret_cast<void*>(end), start + room - end);
  return mapped;
}

const DirectoryEntry* findInDirectory(std::uint8_t* base, std::uint64_t nonce) {
  return entryOf(base, nonce, nonce, nonce);
}

void mapNow(std::uint8_t* data, std::size_t bytes) noexcept {
  constexpr int kPopulateWrite = 23;  // MADV_POPULATE_WRITE of Linux 5.14; headers may lack it
  ::madvise(data, bytes, kPopulateWrite);
}

std::shared_ptr<Arena> Arena::create(std::size_t virtualBytes) {
  rlimit limit{};
  if (::getrlimit(RLIMIT_FSIZE, &limit) == 0 && limit.rlim_cur != RLIM_INFINITY) {
    virtualBytes = std::min<std::size_t>(virtualBytes, limit.rlim_cur / kPage * kPage);
  }
  std::shared_ptr<Arena> arena(new Arena);
  arena->forkGeneration_ = forkGeneration();
  arena->fd_ = makeMemfd();
  if (arena->fd_ < 0) {
    throw Error(ErrorKind::Backend, "fastcoll: cannot create shared memory: memfd_create failed (",
                std::strerror(errno),
                "). Raise the limit on open files, allow the call in the container's seccomp "
                "profile, or set FASTCOLL_SHARED_MEMORY=off.");
  }
  constexpr std::size_t kLeast = std::size_t{64} << 20;
  void* memory = MAP_FAILED;
  std::size_t bytes = std::max(roundToPage(virtualBytes), kLeast);
  for (; bytes >= kLeast; bytes /= 2) {
    if (::ftruncate(arena->fd_, static_cast<off_t>(bytes)) != 0) continue;
    memory = mapShared(arena->fd_, bytes);
    if (memory != MAP_FAILED) break;
  }
  if (memory == MAP_FAILED) {
    throw Error(ErrorKind::Backend, "fastcoll: cannot map ", kLeast, " bytes of shared memory (",
                std::strerror(errno),
                "). Raise the address-space limit (ulimit -v) or set "
                "FASTCOLL_SHARED_MEMORY=off.");
  }
  arena->base_ = static_cast<std::uint8_t*>(memory);
  arena->bytes_ = bytes;
  ::madvise(memory, bytes, MADV_DONTDUMP);
  ::fcntl(arena->fd_, F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL);
  const std::uint64_t offset = arena->allocate(ArenaHeader::kBytes);
  if (offset != 0)
    throw Error(ErrorKind::Backend,
                "fastcoll: internal error: the header of the shared memory is not first",
                kReportThis);

  ArenaHeader* header = arena->header();
  header->magic = kArenaMagic;
  header->abi = kAbiVersion;
  header->pid = static_cast<std::uint32_t>(::getpid());
  header->pidNamespace = pidNamespace();
  header->nonce = randomNonce128();
  header->bytes = bytes;
  std::strncpy(header->host, hostName().c_str(), sizeof header->host - 1);
  return arena;
}

Arena::~Arena() {
  if (base_ != nullptr) ::munmap(base_, bytes_);
  // In a forked child the descriptor is a copy, so closing it affects no other process.
  if (fd_ >= 0) ::close(fd_);
}

std::uint64_t Arena::allocateFrom(std::uint64_t least, std::size_t bytes) {
  const std::size_t need = roundToPage(std::max<std::size_t>(bytes, 1));
  const std::size_t alignment = need >= kHugePage ? kHugePage : kPage;
  const auto align = [alignment](std::uint64_t at) {
    return (at + alignment - 1) / alignment * alignment;
  };
  std::lock_guard<std::mutex> lock(mutex_);
  releaseRetired(Clock::now());
  std::uint64_t offset = align(least);
  for (const auto& [start, extent] : extents_) {  // first fit: extents are few (groups, tensors)
    if (start >= offset + need) break;
    offset = std::max(offset, align(start + extent.bytes));
  }
  if (need > bytes_ || offset > bytes_ - need) {
    throw Error(ErrorKind::Backend, "fastcoll: the shared memory of ", bytes_,
                " bytes has no room for ", need, " more. Raise FASTCOLL_ARENA_BYTES.");
  }
  reserve(offset, need);
  extents_.emplace(offset, Extent{need});
  // Only whole huge pages, which use no extra memory. If the kernel refuses, ordinary pages stay.
  const std::size_t huge = need / kHugePage * kHugePage;
  if (huge > 0) ::madvise(base_ + offset, huge, MADV_COLLAPSE);
  return offset;
}

void Arena::reserve(std::uint64_t offset, std::size_t bytes) {
  // A signal makes fallocate undo its work. Under periodic signals a long call would never end.
  constexpr std::size_t kAtOnce = std::size_t{16} << 20;
  for (std::size_t done = 0; done < bytes; done += kAtOnce) {
    const std::size_t part = std::min(kAtOnce, bytes - done);
    int result = 0;
    do {
      result = ::fallocate(fd_, 0, static_cast<off_t>(offset + done), static_cast<off_t>(part));
    } while (result != 0 && errno == EINTR);
    if (result == 0) continue;
    const int error = errno;
    if (done > 0) punch(offset, done);
    throw Error(ErrorKind::Backend, "fastcoll: cannot reserve ", bytes, " bytes of shared memory (",
                std::strerror(error),
                "). The machine has no memory left for it: free memory, lower "
                "FASTCOLL_RING_BYTES, or set FASTCOLL_SHARED_MEMORY=off.");
  }
}

void Arena::release(std::uint64_t offset) noexcept {
  if (forkGeneration() != forkGeneration_) return;  // the memory belongs to the parent
  std::lock_guard<std::mutex> lock(mutex_);
  const auto found = extents_.find(offset);
  if (found == extents_.end()) return;
  Extent& extent = found->second;
  if (extent.state == Extent::Withdrawn) {
    ::mmap(base_ + offset, extent.bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED, fd_,
           static_cast<off_t>(offset));
    extent.state = Extent::Gone;
  }
  punch(offset, extent.bytes);
  if (extent.state == Extent::Shared) extents_.erase(found);
}

std::uint64_t Arena::offsetOf(const void* data, std::size_t bytes) const {
  const auto at = reinterpret_cast<std::uintptr_t>(data);
  const auto first = reinterpret_cast<std::uintptr_t>(base_);
  if (at < first || at - first >= bytes_ || bytes > bytes_ - (at - first)) return 0;
  const std::uint64_t offset = at - first;
  if (!hasWithdrawn_.load(std::memory_order_acquire)) return offset;
  std::lock_guard<std::mutex> lock(mutex_);
  for (const auto& [start, extent] : extents_) {
    if (extent.state == Extent::Shared) continue;
    if (start < offset + bytes && offset < start + extent.bytes) return 0;
  }
  return offset;
}

bool Arena::withdraw(const void* data, std::size_t bytes) noexcept {
  if (forkGeneration() != forkGeneration_) return true;
  const std::uint64_t offset = offsetOf(data, bytes);
  if (offset == 0) return true;
  std::lock_guard<std::mutex> lock(mutex_);
  for (auto& [start, extent] : extents_) {
    if (start >= offset + bytes || offset >= start + extent.bytes) continue;
    void* copy =
        ::mmap(nullptr, extent.bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (copy == MAP_FAILED) return false;
    std::memcpy(copy, base_ + start, extent.bytes);
    // Peers may still read messages in the shared pages, which therefore stay until release().
    if (::mremap(copy, extent.bytes, extent.bytes, MREMAP_MAYMOVE | MREMAP_FIXED, base_ + start) ==
        MAP_FAILED) {
      ::munmap(copy, extent.bytes);
      return false;
    }
    extent.state = Extent::Withdrawn;
    hasWithdrawn_.store(true, std::memory_order_release);
  }
  return true;
}

void Arena::retire(std::uint64_t offset) noexcept {
  if (forkGeneration() != forkGeneration_) return;
  std::lock_guard<std::mutex> lock(mutex_);
  const auto now = Clock::now();
  releaseRetired(now);
  const auto found = extents_.find(offset);
  if (found != extents_.end()) found->second.reusableFrom = now + kRetirement;
}

/// Frees the pages. Peers that still read there, and the extent's next owner, see zeros.
void Arena::punch(std::uint64_t offset, std::size_t bytes) noexcept {
  ::fallocate(fd_, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, static_cast<off_t>(offset),
              static_cast<off_t>(bytes));
}

void Arena::releaseRetired(TimePoint now) noexcept {
  std::erase_if(extents_, [&](const auto& one) {
    const auto& [offset, extent] = one;
    const bool over = extent.reusableFrom && *extent.reusableFrom <= now;
    if (over) punch(offset, extent.bytes);
    return over;
  });
}

std::size_t Arena::used() const {
  std::lock_guard<std::mutex> lock(mutex_);
  std::size_t total = 0;
  for (const auto& [offset, extent] : extents_) {
    if (!extent.reusableFrom && extent.state != Extent::Gone) total += extent.bytes;
  }
  return total;
}

void Arena::addToDirectory(std::uint64_t nonce, std::uint64_t offset) {
  std::lock_guard<std::mutex> lock(mutex_);
  DirectoryEntry* const entry = entryOf(base_, nonce, 0, kTombstone);
  if (entry == nullptr) {
    throw Error(ErrorKind::Backend, "fastcoll: this process already uses ",
                ArenaHeader::kDirectoryEntries,
                " groups over shared memory. Destroy groups that are no longer needed.");
  }
  entry->offset.store(offset, std::memory_order_relaxed);
  entry->nonce.store(nonce, std::memory_order_release);
}

void Arena::removeFromDirectory(std::uint64_t nonce) noexcept {
  std::lock_guard<std::mutex> lock(mutex_);
  DirectoryEntry* const entry = entryOf(base_, nonce, nonce, nonce);
  if (entry != nullptr) entry->nonce.store(kTombstone, std::memory_order_seq_cst);
}

}  // namespace fastcoll
