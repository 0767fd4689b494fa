#include "cpu/hosts/selector.hpp"

#include "cpu/algorithms/algorithm.hpp"
#include "cpu/hosts/links.hpp"

namespace fastcoll {

HostBroadcast selectHostBroadcast(int hosts, std::size_t bytes, std::size_t linkBytes) {
  const std::size_t others = hosts - 1;
  const std::size_t flat = others * bytes, parts = bytes + (others - 1) * bytes / others;
  if (bytes <= Links::kInlineBytes && flat - parts <= linkBytes) return HostBroadcast::Flat;
  // A chunk of the chain is no shorter than a frame. If the parts fit frames, the chain costs more.
  const bool fit = pieceOf(bytes, hosts - 1, 0).count <= Links::kInlineBytes;
  return fit && hosts > 2 ? HostBroadcast::ScatterAllGather : HostBroadcast::Chain;
}

bool reducesInOneStep(int hosts, std::size_t partial, std::size_t result, std::size_t linkBytes) {
  const std::size_t others = hosts - 1;
  const std::size_t one = others * partial;
  const std::size_t two = others * (partial + result) / hosts;
  if (one <= two) return true;
  return partial <= Links::kInlineBytes && one - two <= linkBytes;
}

}  // namespace fastcoll
