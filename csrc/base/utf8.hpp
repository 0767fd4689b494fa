// UTF-8: RFC 3629, section 4.
#pragma once

#include <algorithm>
#include <cstddef>
#include <string>
#include <string_view>

namespace fastcoll {

/// Bytes of the sequence that begins at `at`, which is inside the text; 0 if the bytes there are
/// not a valid sequence.
inline std::size_t utf8SequenceAt(std::string_view text, std::size_t at) {
  const auto byte = [&](std::size_t i) { return static_cast<unsigned char>(text[i]); };
  const unsigned char first = byte(at);
  std::size_t length = 0;
  if (first < 0x80) length = 1;
  if (first >= 0xc2 && first < 0xe0) length = 2;
  if (first >= 0xe0 && first < 0xf0) length = 3;
  if (first >= 0xf0 && first < 0xf5) length = 4;
  if (length == 0 || at + length > text.size()) return 0;
  for (std::size_t i = 1; i < length; ++i) {
    if ((byte(at + i) & 0xc0) != 0x80) return 0;
  }
  // An overlong form, a surrogate, or a code point above U+10FFFF.
  if (first == 0xe0 && byte(at + 1) < 0xa0) return 0;
  if (first == 0xed && byte(at + 1) >= 0xa0) return 0;
  if (first == 0xf0 && byte(at + 1) < 0x90) return 0;
  if (first == 0xf4 && byte(at + 1) >= 0x90) return 0;
  return length;
}

/// Replaces bytes that are not UTF-8, such as the rest of a cut character, by question marks.
inline std::string validUtf8(std::string text) {
  for (std::size_t at = 0; at < text.size();) {
    const std::size_t length = utf8SequenceAt(text, at);
    if (length == 0) text[at] = '?';
    at += std::max<std::size_t>(length, 1);
  }
  return text;
}

}  // namespace fastcoll
