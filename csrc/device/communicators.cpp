#include "communicators.hpp"

#include <algorithm>

#include "../base/error.hpp"

namespace fastcoll {
namespace {

constexpr int kSuccess = 0;
constexpr int kInProgress = 7;

using Abort = int (*)(void*);
using GetAsyncError = int (*)(void*, int*);
using GetErrorString = const char* (*)(int);

template <typename Function>
Function functionAt(std::uintptr_t address) {
  return reinterpret_cast<Function>(address);
}

}  // namespace

void Communicators::add(std::uintptr_t handle, std::string name) {
  const std::lock_guard<std::mutex> lock(mutex_);
  if (aborted_) {
    functionAt<Abort>(functions_.commAbort)(reinterpret_cast<void*>(handle));
    return;
  }
  all_.push_back({handle, std::move(name)});
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
  const std::lock_guard<std::mutex> lock(mutex_);
  aborted_ = true;
  for (const One& one : all_) {
    functionAt<Abort>(functions_.commAbort)(reinterpret_cast<void*>(one.handle));
  }
  all_.clear();
}

bool Communicators::aborted() const {
  const std::lock_guard<std::mutex> lock(mutex_);
  return aborted_;
}

std::string Communicators::instance() const {
  const std::lock_guard<std::mutex> lock(mutex_);
  return instance_;
}

void Communicators::setInstance(std::string instance) {
  const std::lock_guard<std::mutex> lock(mutex_);
  instance_ = std::move(instance);
}

std::string Communicators::asyncError() {
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
