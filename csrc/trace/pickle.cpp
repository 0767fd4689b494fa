#include "trace/pickle.hpp"

#include <cstring>
#include <limits>

#include "base/utf8.hpp"

namespace fastcoll::trace {
namespace {

void appendLittle(std::string& bytes, std::uint64_t value, int count) {
  for (int i = 0; i < count; ++i) bytes.push_back(static_cast<char>(value >> (8 * i) & 0xff));
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
  const std::string clean = validUtf8(std::string(value));
  op('X');
  appendLittle(bytes_, clean.size(), 4);
  bytes_ += clean;
  return *this;
}

}  // namespace fastcoll::trace
