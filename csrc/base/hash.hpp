// A hash for names and fingerprints. It does not resist chosen inputs.
#pragma once

#include <cstddef>
#include <cstdint>

namespace fastcoll {

constexpr std::uint64_t kFnvBasis = 14695981039346656037ull;

/// FNV-1a, 64 bits (Fowler, Noll, Vo), continued from `hash`.
inline std::uint64_t fnv(const void* data, std::size_t bytes, std::uint64_t hash = kFnvBasis) {
  const auto* p = static_cast<const std::uint8_t*>(data);
  for (std::size_t i = 0; i < bytes; ++i) hash = (hash ^ p[i]) * 1099511628211ull;
  return hash;
}

}  // namespace fastcoll
