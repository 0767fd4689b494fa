#include "trace/memory.hpp"

#include <fcntl.h>
#include <linux/memfd.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <new>

#include "base/log.hpp"

namespace fastcoll::trace {
namespace {

constexpr std::size_t kTexts = std::size_t{16} << 20;
constexpr std::size_t kStep = std::size_t{64} << 10;  // memory is reserved in such steps

std::size_t roundedTo(std::size_t bytes, std::size_t unit) {
  return (bytes + unit - 1) / unit * unit;
}

/// -1 if none can be made, or not so large.
int makeFile(std::size_t bytes, std::size_t backed) {
  rlimit limit{};
  if (::getrlimit(RLIMIT_FSIZE, &limit) == 0 && limit.rlim_cur < bytes) return -1;
  const int fd = static_cast<int>(::syscall(SYS_memfd_create, "trace.fastcoll", MFD_CLOEXEC));
  if (fd < 0) return -1;
  if (::ftruncate(fd, static_cast<off_t>(bytes)) == 0 &&
      ::fallocate(fd, 0, 0, static_cast<off_t>(backed)) == 0) {
    return fd;
  }
  ::close(fd);
  return -1;
}

}  // namespace

Memory::Memory(std::size_t slots, std::size_t slotBytes) {
  const std::size_t texts = roundedTo(Header::kBytes + slots * slotBytes, kStep);
  backed_ = texts + kStep;
  bytes_ = texts + kTexts;
  fd_ = makeFile(bytes_, backed_);
  if (fd_ < 0) {
    log(LogLevel::Info, "no file could be made for the trace (", std::strerror(errno),
        "), so fastcoll top cannot read it");
  }
  const int flags = fd_ < 0 ? MAP_PRIVATE | MAP_ANONYMOUS : MAP_SHARED;
  void* const memory =
      ::mmap(nullptr, bytes_, PROT_READ | PROT_WRITE, flags | MAP_NORESERVE, fd_, 0);
  if (memory == MAP_FAILED) throw std::bad_alloc();
  // A child makes its own. It must not write into this one.
  ::madvise(memory, bytes_, MADV_DONTFORK);
  base_ = static_cast<std::uint8_t*>(memory);
  auto* const header = new (base_) Header;
  header->slotBytes = static_cast<std::uint32_t>(slotBytes);
  header->slots = slots;
  header->texts = texts;
  header->end = texts;
  header->pid = ::getpid();
}

Memory::~Memory() {
  ::munmap(base_, bytes_);
  if (fd_ >= 0) ::close(fd_);
}

/// Returns the offset, or 0.
std::size_t Memory::reserve(std::size_t bytes) {
  const std::size_t begin = roundedTo(header().end.load(std::memory_order_relaxed), 8);
  if (bytes > bytes_ - begin) return 0;
  const std::size_t end = begin + bytes;
  if (end > backed_ && fd_ >= 0) {
    const std::size_t more = std::min(roundedTo(end, kStep), bytes_) - backed_;
    if (::fallocate(fd_, 0, static_cast<off_t>(backed_), static_cast<off_t>(more)) != 0) return 0;
    backed_ += more;
  }
  header().end.store(end, std::memory_order_relaxed);
  return begin;
}

std::uint32_t Memory::add(std::string_view text) {
  const auto length = static_cast<std::uint64_t>(text.size());
  if (header().end + text.size() > header().texts + kTexts / 2) return 0;  // the rest is for JSON
  const std::size_t at = reserve(sizeof length + text.size());
  if (at == 0) return 0;
  std::memcpy(base_ + at, &length, sizeof length);
  std::memcpy(base_ + at + sizeof length, text.data(), text.size());
  return static_cast<std::uint32_t>(at / 8);
}

void Memory::setJson(std::string_view json) {
  Header& all = header();
  Extent& into = json_[all.jsonVersion.load(std::memory_order_relaxed) / 2 % 2];
  if (json.size() > into.bytes) {
    const std::size_t bytes = roundedTo(2 * json.size(), 4096);
    const std::size_t at = reserve(bytes);
    if (at == 0) return;  // the state of before stays
    into = {at, bytes};
  }
  // A reader that still reads the state before the last one finds another version afterwards.
  all.jsonVersion.fetch_add(1, std::memory_order_acq_rel);
  std::memcpy(base_ + into.offset, json.data(), json.size());
  all.jsonOffset.store(into.offset, std::memory_order_relaxed);
  all.jsonBytes.store(json.size(), std::memory_order_relaxed);
  all.jsonVersion.fetch_add(1, std::memory_order_release);
}

}  // namespace fastcoll::trace
