#include "communicators.hpp"

#include <algorithm>
#include <chrono>
#include <utility>

#include "../base/error.hpp"

namespace fastcoll {
namespace {

constexpr int kSuccess = 0;
constexpr std::chrono::milliseconds kCalls{500};
constexpr int kInProgress = 7;

using Abort = int (*)(void*);
using GetAsyncError = int (*)(void*, int*);
using GetErrorString = const char* (*)(int);
using Group = int (*)();

template <typename Function>
Function functionAt(std::uintptr_t address) {
  return reinterpret_cast<Function>(address);
}

}  // namespace

bool Communicators::add(std::uintptr_t handle, std::string name, std::string instance, int peer) {
  const std::lock_guard<std::mutex> lock(mutex_);
  if (aborted()) return false;
  all_.push_back({handle, std::move(name)});
  const std::lock_guard<std::mutex> also(meetingsMutex_);
  if (!instance.empty()) meetings_.push_back({std::move(instance), peer});
  return true;
}

bool Communicators::remove(std::uintptr_t handle) {
  const std::lock_guard<std::mutex> lock(mutex_);
  const auto found =
      std::find_if(all_.begin(), all_.end(), [&](const One& one) { return one.handle == handle; });
  if (found == all_.end()) return false;
  all_.erase(found);
  return true;
}

void Communicators::abortAll() noexcept {
  std::vector<One> all;
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    aborted_.store(true, std::memory_order_release);
    all.swap(all_);
  }
  // Whoever is about to make the next call sees aborted(), and gives up.
  if (calling_.try_lock_for(kCalls)) calling_.unlock();
  // Several at once: the end of one may wait for what another one's kernels keep from running.
  if (all.size() > 1) functionAt<Group>(functions_.groupStart)();
  for (const One& one : all) {
    functionAt<Abort>(functions_.commAbort)(reinterpret_cast<void*>(one.handle));
  }
  if (all.size() > 1) functionAt<Group>(functions_.groupEnd)();
}

std::vector<Meeting> Communicators::meetings() const {
  const std::lock_guard<std::mutex> lock(meetingsMutex_);
  return meetings_;
}

void Communicators::report(std::string text) {
  const std::lock_guard<std::mutex> lock(reportedMutex_);
  if (reported_.empty()) reported_ = std::move(text);
}

std::string Communicators::asyncError() const {
  {
    const std::lock_guard<std::mutex> lock(reportedMutex_);
    if (!reported_.empty()) return reported_;
  }
  const std::lock_guard<std::mutex> lock(mutex_);
  for (const One& one : all_) {
    int status = kSuccess;
    const int asked = functionAt<GetAsyncError>(functions_.commGetAsyncError)(
        reinterpret_cast<void*>(one.handle), &status);
    if (asked != kSuccess) status = asked;
    if (status == kSuccess || status == kInProgress) continue;
    return concat("NCCL reported an error on communicator ", one.name, ": ",
                  functionAt<GetErrorString>(functions_.getErrorString)(status), " (status ",
                  status, ")");
  }
  return "";
}

}  // namespace fastcoll
