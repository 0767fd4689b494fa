// The collectives and point-to-point calls of every engine, and their names.
#pragma once

#include <cstddef>
#include <cstdint>
#include <iterator>

namespace fastcoll {

enum class Collective : std::uint8_t {
#define COLLECTIVE(name, ...) name,
#include "base/collectives.def"
};

/// torch.distributed's name: "all_reduce".
inline const char* collectiveName(Collective collective) {
  constexpr const char* kNames[] = {
#define COLLECTIVE(name, text) text,
#include "base/collectives.def"
  };
  const auto number = static_cast<std::size_t>(collective);
  return number < std::size(kNames) ? kNames[number] : "unknown";
}

}  // namespace fastcoll
