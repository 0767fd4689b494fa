// The sizes at which a collective changes its algorithm: the rows of tuning.def as a struct. They
// change the time, never the result's bits. They are equal on all ranks of a group: the rendezvous
// compares fingerprints. `fastcoll tune` measures those of another host.
#pragma once

#include <cstddef>
#include <cstdint>

#include "base/hash.hpp"

namespace fastcoll {

struct TuningTable {
#define SIZE(field, name, fallback, meaning) std::size_t field = fallback;
#include "cpu/algorithms/tuning.def"

  /// Calls visit(name, member pointer) for each row.
  template <typename Visit>
  static void each(Visit&& visit) {
#define SIZE(field, name, fallback, meaning) visit(name, &TuningTable::field);
#include "cpu/algorithms/tuning.def"
  }

  std::uint64_t fingerprint() const {
    std::uint64_t hash = kFnvBasis;
    each([&](const char*, auto field) { hash = fnv(&(this->*field), sizeof(std::size_t), hash); });
    return hash;
  }
};

}  // namespace fastcoll
