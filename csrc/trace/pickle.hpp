// Writes Python's pickle format (protocol 2) without Python, because a dump must be possible while
// another thread holds the interpreter, or hangs in it.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>

namespace fastcoll::trace {

/// Call in document order. A dict takes keys and values in turns, between beginDict() and
/// endDict().
class Pickle {
 public:
  Pickle() { bytes_ = "\x80\x02"; }

  Pickle& none() { return op('N'); }
  Pickle& boolean(bool value) { return op(value ? '\x88' : '\x89'); }
  Pickle& integer(std::int64_t value);
  Pickle& real(double value);
  /// Bytes that are not UTF-8 are written as '?'.
  Pickle& text(std::string_view value);
  Pickle& beginDict() { return op('}').op('('); }
  Pickle& endDict() { return op('u'); }
  Pickle& beginList() { return op(']').op('('); }
  Pickle& endList() { return op('e'); }
  /// Makes a tuple of the last two values.
  Pickle& pair() { return op('\x86'); }

  Pickle& key(std::string_view name) { return text(name); }
  Pickle& field(std::string_view name, std::int64_t value) { return text(name).integer(value); }
  Pickle& field(std::string_view name, std::string_view value) { return text(name).text(value); }
  Pickle& flag(std::string_view name, bool value) { return text(name).boolean(value); }

  /// Ends the pickle and returns all of it. Call nothing after it.
  std::string finish() {
    op('.');
    return std::move(bytes_);
  }

 private:
  Pickle& op(char code) {
    bytes_.push_back(code);
    return *this;
  }
  std::string bytes_;
};

}  // namespace fastcoll::trace
