#include "cuda/kernel_words.hpp"

#include <iterator>

#include "base/error.hpp"

namespace fastcoll {
namespace {

constexpr const char* kSteps[] = {
    "to do its part",
    "to have its message ready",
    "to have reduced its share",
    "to have read this rank's message",
    "to send the next segment",
    "to free a slot for the next segment",
};

}  // namespace

std::string KernelWords::fault() const {
  const auto status =
      static_cast<std::uint64_t>(__atomic_load_n(words_.get() + 1, __ATOMIC_ACQUIRE));
  if (status == 0) return "";
  const auto step = status & 7, peer = status >> 3 & 31, channel = status >> 8 & 255;
  std::string absent;
  for (int rank = 0; rank < size_; ++rank) {
    if ((status >> (32 + rank) & 1) != 0) absent += concat(absent.empty() ? "" : ", ", rank);
  }
  return concat(prefix_, "a kernel timed out (channel ", channel, "): expected rank ", peer, " ",
                kSteps[step < std::size(kSteps) ? step : 0], ", got no sign of it.",
                absent.empty() ? "" : concat(" Not launched at all on rank ", absent, "."),
                " Find out why that rank is late.");
}

}  // namespace fastcoll
