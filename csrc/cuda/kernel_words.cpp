#include "cuda/kernel_words.hpp"

#include <poll.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cerrno>
#include <iterator>

#include "base/error.hpp"

namespace fastcoll {
namespace {

constexpr const char* kSteps[] = {
    "to do its part",
    "to have its message ready",
    "to have reduced its share",
    "to have read this rank's message",
    "to send the next segment",
    "to free a slot for the next segment",
};

}  // namespace

PeerProcesses::PeerProcesses(const std::map<int, pid_t>& pids) : pids_(pids) {
  for (const auto& [rank, pid] : pids) {
    const int descriptor = static_cast<int>(::syscall(SYS_pidfd_open, pid, 0));
    if (descriptor >= 0 || errno == ESRCH) descriptors_[rank] = descriptor;
  }
}

PeerProcesses::~PeerProcesses() {
  for (const auto& [rank, descriptor] : descriptors_) {
    if (descriptor >= 0) ::close(descriptor);
  }
}

std::string PeerProcesses::ended() const {
  for (const auto& [rank, descriptor] : descriptors_) {
    pollfd one{descriptor, POLLIN, 0};  // readable when the process has ended
    if (descriptor >= 0 && ::poll(&one, 1, 0) <= 0) continue;
    return concat("rank ", rank, " (process ", pids_.at(rank), " of this host) has ended");
  }
  return "";
}

std::string KernelWords::fault() {
  if (gone_.empty()) {
    gone_ = processes_->ended();
    if (!gone_.empty()) endWaits();
  }
  const auto status =
      static_cast<std::uint64_t>(__atomic_load_n(words_.get() + 1, __ATOMIC_ACQUIRE));
  if (status == 0) return "";
  const auto step = status & 7, peer = status >> 3 & 31, channel = status >> 8 & 255;
  std::string absent;
  for (int rank = 0; rank < size_; ++rank) {
    if ((status >> (32 + rank) & 1) != 0) absent += concat(absent.empty() ? "" : ", ", rank);
  }
  const auto waited =
      concat(" (channel ", channel, "): expected rank ", peer, " ",
             kSteps[step < std::size(kSteps) ? step : 0], ", got no sign of it.",
             absent.empty() ? "" : concat(" Not launched at all on rank ", absent, "."));
  if (!gone_.empty()) {
    return concat(prefix_, gone_, " while a kernel waited", waited,
                  " Read the log of that process.");
  }
  return concat(prefix_, "a kernel timed out", waited, " Find out why that rank is late.");
}

}  // namespace fastcoll
