// Copies of a transfer's bytes.
//
// Large results are written past the caches (non-temporal stores): a plain store first reads the
// line it is about to overwrite from memory, and pushes the slots out of the cache. Below some
// megabytes the reader of the result wants to find it in the cache, so plain copies are right.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>

#if defined(__x86_64__)
#include <emmintrin.h>
#endif

namespace fastcoll {

/// memcpy, which a conditional expression can name.
inline void copyPlain(void* to, const void* from, std::size_t bytes) {
  std::memcpy(to, from, bytes);
}

/// Copies `bytes` from `from` to `to`, which do not overlap. The stores are ordered before any
/// later store of this thread, as those of memcpy are.
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
  _mm_sfence();  // non-temporal stores are ordered by nothing else
#else
  std::memcpy(to, from, bytes);
#endif
}

}  // namespace fastcoll
