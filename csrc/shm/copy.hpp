// Copies of a transfer's bytes.
//
// Large results are written past the caches (non-temporal stores). A plain store first reads the
// line that it overwrites from memory, and evicts the rings from the cache. Below some megabytes
// plain copies are right, because the result's reader then finds it in the cache.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>

#if defined(__x86_64__)
#include <emmintrin.h>
#endif

namespace fastcoll {

/// memcpy with the type of copyStreaming, for use in a conditional expression.
inline void copyPlain(void* to, const void* from, std::size_t bytes) {
  std::memcpy(to, from, bytes);
}

/// Copies `bytes` from `from` to `to`, which do not overlap. As with memcpy, the stores are ordered
/// before any later store of this thread.
inline void copyStreaming(void* to, const void* from, std::size_t bytes) {
#if defined(__x86_64__)
  auto* out = static_cast<std::uint8_t*>(to);
  const auto* in = static_cast<const std::uint8_t*>(from);
  constexpr std::size_t kLine = 64;
  const std::size_t head = (kLine - reinterpret_cast<std::uintptr_t>(out) % kLine) % kLine;
  if (bytes < head + kLine) {
    std::memcpy(out, in, bytes);
    return;
  }
  std::memcpy(out, in, head);
  out += head, in += head, bytes -= head;
  for (; bytes >= kLine; out += kLine, in += kLine, bytes -= kLine) {
    const auto* source = reinterpret_cast<const __m128i*>(in);
    auto* target = reinterpret_cast<__m128i*>(out);
    const __m128i a = _mm_loadu_si128(source);
    const __m128i b = _mm_loadu_si128(source + 1);
    const __m128i c = _mm_loadu_si128(source + 2);
    const __m128i d = _mm_loadu_si128(source + 3);
    _mm_stream_si128(target, a);
    _mm_stream_si128(target + 1, b);
    _mm_stream_si128(target + 2, c);
    _mm_stream_si128(target + 3, d);
  }
  std::memcpy(out, in, bytes);
  _mm_sfence();  // nothing else orders non-temporal stores
#else
  std::memcpy(to, from, bytes);
#endif
}

}  // namespace fastcoll
