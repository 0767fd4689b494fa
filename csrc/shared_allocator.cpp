#include "shared_allocator.hpp"

#include <c10/core/CPUAllocator.h>

#include <algorithm>
#include <cstring>
#include <thread>

#include "base/env.hpp"
#include "base/error.hpp"
#include "base/fork.hpp"

namespace fastcoll {
namespace {

// A kept block serves a tensor that leaves no more than an eighth of it unused.
constexpr std::size_t kUnusedPart = 8;
// What may be kept beyond a quarter of the most that was in use at once.
constexpr std::size_t kKeptBytes = std::size_t{64} << 20;

std::size_t wholePages(std::size_t bytes) {
  return (bytes + kPage - 1) / kPage * kPage;
}

}  // namespace

// Never freed: tensors outlive static destructors.
std::atomic<SharedAllocator*> SharedAllocator::current_{nullptr};

SharedAllocator::SharedAllocator() : forkGeneration_(forkGeneration()) {}

bool SharedAllocator::ours() const {
  return forkGeneration_ == forkGeneration();
}

void SharedAllocator::install(const std::shared_ptr<LocalProcess>& process,
                              std::size_t arenaBytes) {
  static std::atomic<bool> installing{false};  // by one thread at a time; a lock may be forked
  while (installing.exchange(true, std::memory_order_acquire)) std::this_thread::yield();
  SharedAllocator* self = current_.load(std::memory_order_acquire);
  if (self == nullptr || !self->ours()) {
    self = new SharedAllocator;
    current_.store(self, std::memory_order_release);
    c10::SetCPUAllocator(self);
  }
  installing.store(false, std::memory_order_release);
  std::lock_guard<std::mutex> lock(self->mutex_);
  if (self->process_.lock() != process) self->releaseKept(0);
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
  SharedAllocator* self = current_.load(std::memory_order_acquire);
  // Of a forked child's parent: the child must leave it alone.
  if (self->ours() && self->give(data)) c10::profiledCPUMemoryReporter().Delete(data);
}

void SharedAllocator::deleteAny(void* data) {
  SharedAllocator* self = current_.load(std::memory_order_acquire);
  if (!self->ours() || !self->give(data)) {
    return c10::GetDefaultCPUAllocator()->raw_deleter()(data);
  }
  c10::profiledCPUMemoryReporter().Delete(data);
}

/// The arena of the process's groups, made now if it must be; nullptr when there is no group.
std::shared_ptr<Arena> SharedAllocator::arena() {
  const std::shared_ptr<LocalProcess> process = process_.lock();
  if (process == nullptr) return nullptr;
  process->start(arenaBytes_);
  return process->arena();
}

void* SharedAllocator::take(std::size_t bytes) {
  if (!ours()) return nullptr;
  const std::size_t need = wholePages(bytes);
  std::lock_guard<std::mutex> lock(mutex_);
  try {
    const std::shared_ptr<Arena> arena = this->arena();
    if (arena == nullptr) return nullptr;
    Block block;
    const auto fit = kept_.lower_bound(need);
    if (fit != kept_.end() && fit->first <= need + need / kUnusedPart) {
      block = fit->second;
      kept_.erase(fit);
      keptBytes_ -= block.bytes;
    } else {
      const std::size_t most = std::max(mostUsedBytes_, usedBytes_ + need);
      const std::size_t room = most + most / 4 + kKeptBytes - (usedBytes_ + need);
      releaseKept(room);
      block = {arena, arena->allocate(need), need};
    }
    void* data = block.arena->base() + block.offset;
    usedBytes_ += block.bytes;
    mostUsedBytes_ = std::max(mostUsedBytes_, usedBytes_);
    blocks_.emplace(data, std::move(block));
    return data;
  } catch (const Error& error) {
    if (!warned_) {
      warned_ = true;
      log(LogLevel::Warn, concat("a tensor of ", bytes,
                                 " bytes has ordinary memory, though FASTCOLL_SHARED_TENSORS "
                                 "or Options.shared_tensors is on: ",
                                 error.what(), " It is said once."));
    }
    return nullptr;
  }
}

/// Takes a block back; false if it is none of these.
bool SharedAllocator::give(void* data) noexcept {
  std::lock_guard<std::mutex> lock(mutex_);
  const auto found = blocks_.find(data);
  if (found == blocks_.end()) return false;
  Block block = std::move(found->second);
  blocks_.erase(found);
  usedBytes_ -= block.bytes;
  const std::shared_ptr<LocalProcess> process = process_.lock();
  // One that was withdrawn after a fault must not be handed out again.
  const bool keep = process != nullptr && process->arena() == block.arena &&
                    block.arena->offsetOf(data, block.bytes) != 0;
  if (keep) {
    keptBytes_ += block.bytes;
    kept_.emplace(block.bytes, std::move(block));
  } else {
    block.arena->release(block.offset);
  }
  return true;
}

/// Gives kept blocks back, the largest first, until at most so many bytes are kept.
void SharedAllocator::releaseKept(std::size_t most) noexcept {
  while (keptBytes_ > most && !kept_.empty()) {
    const auto last = std::prev(kept_.end());
    last->second.arena->release(last->second.offset);
    keptBytes_ -= last->first;
    kept_.erase(last);
  }
}

}  // namespace fastcoll
