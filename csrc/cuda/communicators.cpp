#include "cuda/communicators.hpp"

#include <algorithm>
#include <chrono>
#include <utility>

#include "base/error.hpp"

namespace fastcoll {
namespace {

constexpr std::chrono::milliseconds kCalls{500};

void* handleOf(const NcclCalls& calls) {
  return reinterpret_cast<void*>(calls.communicator());
}

}  // namespace

void Family::end(const std::string& cause) noexcept {
  const std::lock_guard<std::mutex> lock(mutex_);
  if (ended()) return;
  cause_ = cause;
  ended_.store(true, std::memory_order_release);
}

std::string Family::cause() const {
  const std::lock_guard<std::mutex> lock(mutex_);
  return cause_;
}

Communicators::Communicators(std::string group)
    : group_(std::move(group)), families_{std::make_shared<Family>()}, now_(families_[0].get()) {}

void Communicators::join(Communicators& other) {
  auto theirs = other.family();
  const std::lock_guard<std::mutex> lock(mutex_);
  families_.push_back(std::move(theirs));
  now_.store(families_.back().get(), std::memory_order_release);
}

std::shared_ptr<Family> Communicators::family() const {
  const std::lock_guard<std::mutex> lock(mutex_);
  return families_.back();
}

std::string Communicators::familyFault() const {
  const auto kin = family();
  return kin->ended() && !aborted_.load(std::memory_order_acquire) ? kin->cause() : "";
}

std::string Communicators::abortCause() const {
  const auto kin = family();
  const std::lock_guard<std::mutex> lock(mutex_);
  return aborted_.load(std::memory_order_acquire) ? abortCause_ : kin->cause();
}

bool Communicators::add(std::shared_ptr<NcclCalls> calls, int device, std::string name,
                        std::string instance, int peer) {
  const std::lock_guard<std::mutex> lock(mutex_);
  if (aborted()) return false;
  all_.push_back({std::move(calls), device, peer, std::move(name)});
  const std::lock_guard<std::mutex> also(domainsMutex_);
  if (!instance.empty()) domains_.push_back({std::move(instance), peer});
  return true;
}

bool Communicators::remove(const std::shared_ptr<NcclCalls>& calls) {
  const std::lock_guard<std::mutex> notAsked(asking_);
  const std::lock_guard<std::mutex> lock(mutex_);
  const auto found =
      std::find_if(all_.begin(), all_.end(), [&](const One& one) { return one.calls == calls; });
  if (found == all_.end()) return false;
  all_.erase(found);
  return true;
}

std::shared_ptr<NcclCalls> Communicators::find(int device, int peer) const {
  const std::lock_guard<std::mutex> lock(mutex_);
  for (const One& one : all_) {
    if (one.device == device && one.peer == peer) return one.calls;
  }
  return nullptr;
}

void Communicators::addKernels(KernelWords words) {
  const std::lock_guard<std::mutex> lock(mutex_);
  if (aborted()) words.endWaits();
  kernels_.push_back(std::move(words));
  hasKernels_.store(true, std::memory_order_relaxed);
}

std::string Communicators::kernelError() {
  const std::lock_guard<std::mutex> lock(mutex_);
  for (const KernelWords& one : kernels_) {
    if (auto fault = one.fault(); !fault.empty()) return fault;
  }
  return "";
}

void Communicators::beginAbort(const std::string& cause) noexcept {
  const auto kin = family();
  const std::lock_guard<std::mutex> lock(mutex_);
  if (abortCause_.empty()) abortCause_ = cause;
  aborted_.store(true, std::memory_order_release);
  for (KernelWords& one : kernels_) one.endWaits();
  if (all_.empty()) return;
  kin->end(concat("group '", group_,
                  "', whose communicators share resources with this group's (split_share), was "
                  "aborted, so NCCL ended the calls of both. Read the error of that group."));
}

void Communicators::abortAll(const std::string& cause) noexcept {
  beginAbort(cause);  // the library's abort would wait for the kernels
  std::vector<One> all;
  const auto kin = family();
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    all.swap(all_);
  }
  if (all.empty()) return;
  for (const One& one : all) one.calls->end();
  // Wait for a thread between two calls: its next call sees end() and throws.
  if (kin->calling.try_lock_for(kCalls)) kin->calling.unlock();
  // One group of a family at a time, if the abort of another does not hang.
  const std::unique_lock<std::timed_mutex> alone(kin->aborting, kCalls);
  const std::lock_guard<std::mutex> notAsked(asking_);
  const NcclFunctions& nccl = all.front().calls->functions();
  // Abort all in one group: the abort of one may wait for work that the kernels of another block.
  if (all.size() > 1) nccl.groupStart();
  for (const One& one : all) nccl.commAbort(handleOf(*one.calls));
  if (all.size() > 1) nccl.groupEnd();
}

std::vector<FaultDomain> Communicators::domains() const {
  const std::lock_guard<std::mutex> lock(domainsMutex_);
  return domains_;
}

std::string Communicators::asyncError() {
  if (auto said = kernelError(); !said.empty()) return said;
  if (auto cause = familyFault(); !cause.empty()) return cause;
  const std::lock_guard<std::mutex> asking(asking_);
  std::vector<One> all;
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    all = all_;
  }
  for (const One& one : all) {
    const NcclFunctions& nccl = one.calls->functions();
    const int status = nccl.statusOf(one.calls->communicator());
    if (status == kNcclSuccess || status == kNcclInProgress) continue;
    return concat("NCCL reported an error on communicator ", one.name, ": ",
                  nccl.getErrorString(status), " (status ", status,
                  "). Set NCCL_DEBUG=WARN for details.");
  }
  return "";
}

std::vector<CommunicatorMemory> Communicators::memory() const {
  const std::lock_guard<std::mutex> asking(asking_);
  std::vector<One> all;
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    all = all_;
  }
  std::vector<CommunicatorMemory> found;
  for (const One& one : all) {
    found.push_back({one.name, one.calls->functions().bytesOf(one.calls->communicator())});
  }
  return found;
}

}  // namespace fastcoll
