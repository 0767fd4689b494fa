#include "reduce/digest.hpp"

#include <algorithm>
#include <array>
#include <cstring>

#include "reduce/reduce.hpp"

namespace fastcoll {
namespace {

constexpr std::size_t kWord = sizeof(std::uint32_t);
constexpr std::size_t kBlock = 1024;  // words; their keys stay in the first-level cache

constexpr auto kKeys = [] {
  std::array<std::uint32_t, kBlock> keys{};
  for (std::size_t i = 0; i < kBlock; ++i) keys[i] = std::uint32_t(digestKey(~i) >> 32) | 1;
  return keys;
}();

}  // namespace

std::uint64_t digestOf(std::size_t offset, const void* data, std::size_t bytes) noexcept {
  const auto* from = static_cast<const std::uint8_t*>(data);
  const DigestFn kernel = digestFunction();
  std::uint64_t digest = 0;
  while (bytes > 0) {
    const std::size_t word = offset / kWord % kBlock, within = offset % kWord;
    std::size_t take = std::min(kWord - within, bytes);
    std::uint64_t part = 0;
    if (take == kWord) {
      const std::size_t words = std::min(kBlock - word, bytes / kWord);
      take = words * kWord;
      part = kernel(from, kKeys.data() + word, words);
    } else {  // a part of a word: its other bytes come at their own offsets, or are none
      std::uint32_t value = 0;
      std::memcpy(reinterpret_cast<std::uint8_t*>(&value) + within, from, take);
      part = std::uint64_t(value) * kKeys[word];
    }
    digest += part * digestKey(offset / kWord / kBlock);
    offset += take, from += take, bytes -= take;
  }
  return digest;
}

}  // namespace fastcoll
