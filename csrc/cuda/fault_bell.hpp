// One key of a store that changes after each report of a fault, by any rank of any group. So a
// process reads one key a second, and the keys of its groups only after a change.
#pragma once

#include <torch/csrc/distributed/c10d/Store.hpp>

#include <cstdint>
#include <memory>
#include <string>
#include <utility>

#include "base/store.hpp"

namespace fastcoll {

class FaultBell {
 public:
  /// The bell of the store under all prefixes, one for all groups that use it.
  static std::shared_ptr<FaultBell> of(c10::intrusive_ptr<c10d::Store> store);
  /// `store` has no prefix: all groups use one key.
  explicit FaultBell(std::unique_ptr<KeyValueStore> store) : store_(std::move(store)) {}

  /// Call it after a report. Throws Error(Network).
  void ring();
  /// How often the key was found changed. Reads it in the first call of each `second`. One thread
  /// calls it. After five failures in a row it reads no more, because a store that is gone may
  /// block each read for long.
  std::uint64_t rings(std::uint64_t second) noexcept;

 private:
  const std::unique_ptr<KeyValueStore> store_;
  std::string last_;
  std::uint64_t second_ = 0;
  std::uint64_t rings_ = 0;
  int failures_ = 0;
};

}  // namespace fastcoll
