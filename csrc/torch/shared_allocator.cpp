#include "torch/shared_allocator.hpp"

#include <c10/core/CPUAllocator.h>
#include <fcntl.h>
#include <pthread.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <exception>
#include <utility>

#include "base/error.hpp"
#include "base/fork.hpp"
#include "base/log.hpp"

namespace fastcoll {
namespace {

// A kept block serves a tensor if it is larger by no more than an eighth of the tensor.
constexpr std::size_t kUnusedPart = 8;
// Bytes that may be kept beyond a quarter of the most that was in use at once.
constexpr std::size_t kKeptBytes = std::size_t{64} << 20;

// The allocator whose lock a fork holds. Set and read on the forking thread.
SharedAllocator* forking = nullptr;

}  // namespace

// --- forks -------------------------------------------------------------------------------------

void Forks::prepare() noexcept {
  reap();
  if (::pipe2(ends_, O_CLOEXEC | O_NONBLOCK) != 0) ends_[0] = ends_[1] = -1;
}

void Forks::parent() noexcept {
  if (ends_[1] >= 0) ::close(ends_[1]);
  try {
    forks_.push_back({++latest_, ends_[0]});
  } catch (const std::bad_alloc&) {
    std::terminate();  // else a child would see its tensors change
  }
}

void Forks::child() noexcept {
  // The writing end stays open in this child and its own children, until they end.
  if (ends_[0] >= 0) ::close(ends_[0]);
}

bool Forks::alive(std::uint64_t after, std::uint64_t last) const {
  return std::ranges::any_of(
      forks_, [&](const Fork& fork) { return fork.number > after && fork.number <= last; });
}

void Forks::reap() noexcept {
  const auto ended = [](const Fork& fork) {
    char nothing;
    if (fork.reader < 0 || ::read(fork.reader, &nothing, 1) != 0) return false;
    ::close(fork.reader);
    return true;
  };
  std::erase_if(forks_, ended);
}

void SharedAllocator::beforeFork() noexcept {
  SharedAllocator* self = current_.load(std::memory_order_acquire);
  if (self == nullptr || !self->ours()) return;
  self->mutex_.lock();
  forking = self;
  if (!self->blocks_.empty()) self->forks_.prepare();
}

void SharedAllocator::afterForkInParent() noexcept {
  SharedAllocator* self = std::exchange(forking, nullptr);
  if (self == nullptr) return;
  if (!self->blocks_.empty()) self->forks_.parent();
  self->mutex_.unlock();
}

void SharedAllocator::afterForkInChild() noexcept {
  SharedAllocator* self = std::exchange(forking, nullptr);
  if (self == nullptr) return;
  if (!self->blocks_.empty()) self->forks_.child();
  for (const auto& [data, block] : self->blocks_) {
    // If this fails, the shared mapping stays: the child reads correct data, and should not write.
    ::mmap(data, block.bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_FIXED,
           block.arena->descriptor(), static_cast<off_t>(block.offset));
  }
  self->mutex_.unlock();
}

// --- the allocator -----------------------------------------------------------------------------

// Never freed: tensors outlive static destructors.
std::atomic<SharedAllocator*> SharedAllocator::current_{nullptr};
std::atomic<SharedAllocator::Range*> SharedAllocator::ranges_{nullptr};

SharedAllocator::SharedAllocator() : forkGeneration_(forkGeneration()) {}

bool SharedAllocator::ours() const {
  return forkGeneration_ == forkGeneration();
}

void SharedAllocator::install(const std::shared_ptr<LocalProcess>& process,
                              std::size_t arenaBytes) {
  static const int atFork =
      ::pthread_atfork(&beforeFork, &afterForkInParent, &afterForkInChild);  // 0
  static_cast<void>(atFork);
  SharedAllocator* self = current_.load(std::memory_order_acquire);
  if (self == nullptr || !self->ours()) {
    auto made = std::unique_ptr<SharedAllocator>(new SharedAllocator);
    if (current_.compare_exchange_strong(self, made.get())) {
      self = made.release();
      c10::SetCPUAllocator(self);
    }
  }
  std::shared_ptr<LocalProcess> before;
  std::lock_guard<std::mutex> lock(self->mutex_);
  before = self->process_.lock();
  if (before != process) self->releaseKept(0);
  self->process_ = process;
  self->arenaBytes_ = arenaBytes;
}

void SharedAllocator::trim() noexcept {
  SharedAllocator* self = current_.load(std::memory_order_acquire);
  if (self == nullptr || !self->ours()) return;
  std::lock_guard<std::mutex> lock(self->mutex_);
  self->releaseKept(0);
}

c10::DataPtr SharedAllocator::allocate(std::size_t bytes) {
  void* data = bytes < kLeastBytes ? nullptr : take(bytes);
  if (data == nullptr) return c10::GetDefaultCPUAllocator()->allocate(bytes);
  c10::profiledCPUMemoryReporter().New(data, bytes);
  return {data, data, &deleteBlock, c10::Device(c10::DeviceType::CPU)};
}

c10::DeleterFnPtr SharedAllocator::raw_deleter() const {
  return &deleteAny;
}

void SharedAllocator::copy_data(void* to, const void* from, std::size_t bytes) const {
  std::memcpy(to, from, bytes);
}

void SharedAllocator::deleteBlock(void* data) {
  // A forked child leaves its parent's blocks alone, even if it has its own allocator.
  SharedAllocator* self = current_.load(std::memory_order_acquire);
  if (self->ours()) self->give(data);
}

void SharedAllocator::deleteAny(void* data) {
  if (inArena(data)) return deleteBlock(data);
  c10::GetDefaultCPUAllocator()->raw_deleter()(data);
}

bool SharedAllocator::inArena(const void* data) {
  const auto at = reinterpret_cast<std::uintptr_t>(data);
  for (const Range* range = ranges_.load(std::memory_order_acquire); range != nullptr;
       range = range->next) {
    if (range->first <= at && at < range->end) return true;
  }
  return false;
}

void* SharedAllocator::take(std::size_t bytes) {
  if (!ours()) return nullptr;
  std::shared_ptr<LocalProcess> process;  // destroyed after the lock, as that may wait for a thread
  std::lock_guard<std::mutex> lock(mutex_);
  process = process_.lock();
  if (process == nullptr) {
    releaseKept(0);
    return nullptr;
  }
  try {
    process->start(arenaBytes_);
    Block block = newBlock(process->arena(), roundToPage(bytes));
    void* data = block.arena->base() + block.offset;
    if (!inArena(data)) {
      const auto first = reinterpret_cast<std::uintptr_t>(block.arena->base());
      ranges_.store(new Range{first, first + block.arena->bytes(), ranges_.load()},
                    std::memory_order_release);
    }
    block.after = forks_.latest();
    const std::size_t size = block.bytes;
    blocks_.emplace(data, std::move(block));
    usedBytes_ += size;
    mostUsedBytes_ = std::max(mostUsedBytes_, usedBytes_);
    return data;
  } catch (const std::exception& error) {
    if (!warned_) {
      warned_ = true;
      log(LogLevel::Warn, "a tensor of ", bytes,
          " bytes has ordinary memory, though FASTCOLL_SHARED_TENSORS ",
          "or Options.shared_tensors is on: ", error.what(), " This is reported once.");
    }
    return nullptr;
  }
}

SharedAllocator::Block SharedAllocator::newBlock(const std::shared_ptr<Arena>& arena,
                                                 std::size_t bytes) {
  auto fit = kept_.lower_bound(bytes);
  if (fit == kept_.end() || fit->first > bytes + bytes / kUnusedPart) {
    if (!held_.empty()) {
      releaseHeld(process_.lock());
      fit = kept_.lower_bound(bytes);
    }
  }
  if (fit != kept_.end() && fit->first <= bytes + bytes / kUnusedPart) {
    Block block = std::move(fit->second);
    keptBytes_ -= fit->first;
    kept_.erase(fit);
    return block;
  }
  const std::size_t used = usedBytes_ + bytes;
  const std::size_t most = std::max(mostUsedBytes_, used);
  releaseKept(most + most / 4 + kKeptBytes - used);
  return reserve(arena, bytes);
}

SharedAllocator::Block SharedAllocator::reserve(const std::shared_ptr<Arena>& arena,
                                                std::size_t bytes) {
  try {
    return {arena, arena->allocateTensor(bytes), bytes};
  } catch (const Error&) {
    if (keptBytes_ == 0) throw;
    releaseKept(0);  // makes room
    return {arena, arena->allocateTensor(bytes), bytes};
  }
}

void SharedAllocator::give(void* data) noexcept {
  std::shared_ptr<LocalProcess> process;
  std::lock_guard<std::mutex> lock(mutex_);
  const auto found = blocks_.find(data);
  if (found == blocks_.end()) return;  // the block of this forked child's parent
  // Before the block can be reused.
  c10::profiledCPUMemoryReporter().Delete(data);
  Block block = std::move(found->second);
  blocks_.erase(found);
  usedBytes_ -= block.bytes;
  process = process_.lock();
  if (process == nullptr) releaseKept(0);
  block.last = forks_.latest();
  giveBack(std::move(block), process);
}

/// Takes back a block that torch does not use: holds, keeps or releases it.
void SharedAllocator::giveBack(Block block, const std::shared_ptr<LocalProcess>& process) noexcept {
  if (forks_.alive(block.after, block.last)) {
    held_.push_back(std::move(block));
    return;
  }
  const std::uint8_t* data = block.arena->base() + block.offset;
  // A block that was withdrawn after a fault must not be reused.
  const bool keep = process != nullptr && process->started() && process->arena() == block.arena &&
                    block.arena->offsetOf(data, block.bytes) != 0;
  if (keep) {
    keptBytes_ += block.bytes;
    kept_.emplace(block.bytes, std::move(block));
  } else {
    block.arena->release(block.offset);
  }
}

/// Releases kept blocks, the largest first, until at most `most` bytes are kept.
void SharedAllocator::releaseKept(std::size_t most) noexcept {
  while (keptBytes_ > most && !kept_.empty()) {
    const auto last = std::prev(kept_.end());
    last->second.arena->release(last->second.offset);
    keptBytes_ -= last->first;
    kept_.erase(last);
  }
}

/// Takes back the blocks that were held for children that have ended.
void SharedAllocator::releaseHeld(const std::shared_ptr<LocalProcess>& process) noexcept {
  forks_.reap();
  for (Block& block : std::exchange(held_, {})) giveBack(std::move(block), process);
}

}  // namespace fastcoll
