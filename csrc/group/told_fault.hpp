// A group's fault in the store, for ranks that share no memory, or none yet:
//
//   f/<H>      the first fault of the ranks whose records hash to H (see rendezvous.hpp)
//   f/<nonce>  the fault of the rank whose record has that nonce, for one that meets only it
//
// Neither key can be stale. Any process that reaches the store can write there, so the value is
// used only for an error.
#pragma once

#include <cstdint>
#include <optional>
#include <string>

#include "../base/error.hpp"
#include "../base/store.hpp"

namespace fastcoll {

struct ToldFault {
  ErrorKind kind = ErrorKind::Backend;
  std::string text;
  std::int64_t toldAt = 0;  // when it was written: milliseconds since 1970, by its writer's clock
};

/// The current time, by the clock of `toldAt`.
std::int64_t millisSince1970();

std::string faultKey(const std::string& hash);
std::string faultKey(std::uint64_t nonce);
/// nullopt if there is no fault. Throws Error(Network) when the store cannot be reached.
std::optional<ToldFault> readFault(KeyValueStore& store, const std::string& key);
/// Writes the fault unless the key holds one; returns what the key then holds.
ToldFault writeFault(KeyValueStore& store, const std::string& key, const ToldFault& fault);

}  // namespace fastcoll
