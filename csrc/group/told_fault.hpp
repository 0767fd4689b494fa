// A group's fault as the store holds it, for ranks that share no memory, or none yet:
//
//   f/<H>      the first fault of the ranks whose records hash to H (see rendezvous.hpp)
//   f/<nonce>  the fault of the rank whose record has that nonce, for one that meets it alone
//
// Neither key can be stale. Whoever reaches the store can write there, so that nothing but the text
// of an error follows from what it holds.
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

/// Now, by the clock of `toldAt`.
std::int64_t millisSince1970();

std::string faultKey(const std::string& hash);
std::string faultKey(std::uint64_t nonce);
/// nullopt where nothing was told there. Throws Error(Network) when the store cannot be reached.
std::optional<ToldFault> readFault(KeyValueStore& store, const std::string& key);
/// Writes the fault unless there is one; returns what is there then.
ToldFault writeFault(KeyValueStore& store, const std::string& key, const ToldFault& fault);

}  // namespace fastcoll
