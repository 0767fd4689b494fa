#include "cuda/fault_bell.hpp"

#include <torch/csrc/distributed/c10d/PrefixStore.hpp>

#include <exception>
#include <map>
#include <mutex>
#include <random>
#include <utility>

#include "base/error.hpp"
#include "base/weak_registry.hpp"
#include "torch/store_adapter.hpp"

namespace fastcoll {
namespace {

constexpr const char* kKey = "fastcoll/bell";
constexpr int kFailures = 5;

}  // namespace

std::shared_ptr<FaultBell> FaultBell::of(c10::intrusive_ptr<c10d::Store> store) {
  struct Bells {
    std::mutex mutex;
    std::map<const c10d::Store*, std::weak_ptr<FaultBell>> of;
  };
  if (auto* const prefixed = dynamic_cast<c10d::PrefixStore*>(store.get())) {
    store = prefixed->getUnderlyingNonPrefixStore();
  }
  Bells& bells = perProcess<Bells>();
  const std::lock_guard<std::mutex> lock(bells.mutex);
  std::erase_if(bells.of, [](const auto& one) { return one.second.expired(); });
  auto& known = bells.of[store.get()];
  auto bell = known.lock();
  if (bell == nullptr) {
    // It keeps the store, so no other store gets this address meanwhile.
    bell = std::make_shared<FaultBell>(std::make_unique<StoreAdapter>(store));
    known = bell;
  }
  return bell;
}

void FaultBell::ring() {
  std::random_device random;
  store_->set(kKey, concat(random(), ' ', random()));
}

std::uint64_t FaultBell::rings(std::uint64_t second) noexcept {
  if (std::exchange(second_, second) == second || failures_ == kFailures) return rings_;
  try {
    std::string value;
    if (store_->tryGet(kKey, value) && value != last_) {
      last_ = std::move(value);
      ++rings_;
    }
    failures_ = 0;
  } catch (const std::exception&) {
    ++failures_;
  }
  return rings_;
}

}  // namespace fastcoll
