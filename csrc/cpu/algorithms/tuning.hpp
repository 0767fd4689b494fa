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
#undef SIZE

  /// Calls visit(name, member pointer) for each row.
  template <typename Visit>
  static void each(Visit&& visit) {
#define SIZE(field, name, fallback, meaning) visit(name, &TuningTable::field);
#include "cpu/algorithms/tuning.def"
#undef SIZE
  }

  std::uint64_t fingerprint() const {
#define SIZE(field, name, fallback, meaning) field,
    const std::size_t values[] = {
#include "cpu/algorithms/tuning.def"
    };
#undef SIZE
    return fnv(values, sizeof values);
  }
};

}  // namespace fastcoll
