// Tells and hears of a group's first fault through the store, for ranks that share no memory. On
// pooled threads, because a store may be slow or gone, and nobody must wait for it for long.
#pragma once

#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "../base/clock.hpp"
#include "../group/told_fault.hpp"

namespace fastcoll {

class FirstFault {
 public:
  explicit FirstFault(std::shared_ptr<KeyValueStore> store);

  /// Tells a fault under all the keys, and returns what the first of them holds then: another
  /// rank's fault if that was there before. Waits for the store no longer than `patience`.
  ToldFault tell(std::vector<std::string> keys, const ToldFault& fault,
                 Milliseconds patience) noexcept;
  /// What is told under the key, as far as it is known within `patience`. Ask again.
  std::optional<ToldFault> heard(const std::string& key, Milliseconds patience) noexcept;

 private:
  struct Shared;
  std::shared_ptr<Shared> shared_;  // with the jobs, which may outlive this
};

}  // namespace fastcoll
