// A group's fault in the store, for ranks that share no memory, or none yet:
//
//   f/<H>      the first fault of the ranks whose records hash to H (see rendezvous.hpp)
//   f/<nonce>  the fault of the rank whose record has that nonce, for one that meets only it
//
// Neither key can be stale. Any process that reaches the store can write there, so the value is
// used only for an error.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "base/clock.hpp"
#include "base/error.hpp"
#include "base/exported.hpp"
#include "base/store.hpp"

namespace fastcoll {

/// The current time, by the clock of Fault::publishedAt.
std::int64_t millisSince1970();

FASTCOLL_EXPORTED std::string faultKey(const std::string& hash);
std::string faultKey(std::uint64_t nonce);
/// nullopt if there is no fault. Throws Error(Network) when the store cannot be reached.
FASTCOLL_EXPORTED std::optional<Fault> readFault(KeyValueStore& store, const std::string& key);
/// Writes the fault unless the key holds one; returns what the key then holds.
FASTCOLL_EXPORTED Fault writeFault(KeyValueStore& store, const std::string& key,
                                   const Fault& fault);

/// Publishes and reads a group's first fault on other threads, because a store may be slow or gone,
/// and no caller may wait for it long.
class ErrorChannel {
 public:
  explicit ErrorChannel(std::shared_ptr<KeyValueStore> store);

  /// Publishes a fault under all the keys, once. Returns what the first key then holds: another
  /// rank's fault if that came first. Waits for the store for `patience` at most.
  Fault publish(std::vector<std::string> keys, const Fault& fault, Milliseconds patience) noexcept;
  /// The first fault under the keys, if it was read within `patience`. Otherwise call again.
  std::optional<Fault> check(std::vector<std::string> keys, Milliseconds patience) noexcept;

 private:
  struct Shared;
  const std::shared_ptr<Shared> shared_;  // shared with the jobs, which may outlive this
};

}  // namespace fastcoll
