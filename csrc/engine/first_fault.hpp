// Writes and reads a group's first fault in the store, for ranks that share no memory. Pooled
// threads do it, because a store may be slow or gone, and no caller may wait for it long.
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

  /// Writes a fault under all the keys. Returns what the first key then holds: another rank's fault
  /// if that came first. Waits for the store for `patience` at most.
  ToldFault tell(std::vector<std::string> keys, const ToldFault& fault,
                 Milliseconds patience) noexcept;
  /// The fault under the key, if it was read within `patience`. Otherwise call again.
  std::optional<ToldFault> heard(const std::string& key, Milliseconds patience) noexcept;

 private:
  struct Shared;
  std::shared_ptr<Shared> shared_;  // shared with the jobs, which may outlive this
};

}  // namespace fastcoll
