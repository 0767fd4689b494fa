#include "pickle.hpp"

#include <cstring>
#include <limits>

namespace fastcoll::trace {
namespace {

void appendLittle(std::string& bytes, std::uint64_t value, int count) {
  for (int i = 0; i < count; ++i) bytes.push_back(static_cast<char>(value >> (8 * i) & 0xff));
}

/// Length of the UTF-8 sequence that begins here, or 0 if none does.
std::size_t sequenceAt(std::string_view text, std::size_t at) {
  const auto byte = [&](std::size_t i) { return static_cast<unsigned char>(text[i]); };
  const unsigned char first = byte(at);
  const std::size_t length = first < 0x80                    ? 1
                             : first >= 0xc2 && first < 0xe0 ? 2
                             : first >= 0xe0 && first < 0xf0 ? 3
                             : first >= 0xf0 && first < 0xf5 ? 4
                                                             : 0;
  if (length == 0 || at + length > text.size()) return 0;
  for (std::size_t i = 1; i < length; ++i) {
    if ((byte(at + i) & 0xc0) != 0x80) return 0;
  }
  // Too long a form, a surrogate, or beyond the last character.
  if (first == 0xe0 && byte(at + 1) < 0xa0) return 0;
  if (first == 0xed && byte(at + 1) >= 0xa0) return 0;
  if (first == 0xf0 && byte(at + 1) < 0x90) return 0;
  if (first == 0xf4 && byte(at + 1) >= 0x90) return 0;
  return length;
}

}  // namespace

Pickle& Pickle::integer(std::int64_t value) {
  if (value >= std::numeric_limits<std::int32_t>::min() &&
      value <= std::numeric_limits<std::int32_t>::max()) {
    op('J');
    appendLittle(bytes_, static_cast<std::uint64_t>(value), 4);
  } else {
    op('\x8a').op('\x08');
    appendLittle(bytes_, static_cast<std::uint64_t>(value), 8);
  }
  return *this;
}

Pickle& Pickle::real(double value) {
  std::uint64_t bits;
  std::memcpy(&bits, &value, 8);
  op('G');
  for (int i = 7; i >= 0; --i) bytes_.push_back(static_cast<char>(bits >> (8 * i) & 0xff));
  return *this;
}

Pickle& Pickle::text(std::string_view value) {
  std::string clean;
  clean.reserve(value.size());
  for (std::size_t i = 0; i < value.size();) {
    const std::size_t length = sequenceAt(value, i);
    if (length == 0) {
      clean.push_back('?');
      ++i;
    } else {
      clean.append(value.substr(i, length));
      i += length;
    }
  }
  op('X');
  appendLittle(bytes_, clean.size(), 4);
  bytes_ += clean;
  return *this;
}

}  // namespace fastcoll::trace
