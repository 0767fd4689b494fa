#include "told_fault.hpp"

#include <algorithm>
#include <cctype>
#include <chrono>
#include <cstdlib>

#include "../base/utf8.hpp"

namespace fastcoll {
namespace {

constexpr std::size_t kLongest = 1000;

// The kinds of fault that other ranks may raise. One rank's bad arguments are not theirs.
char letterOf(ErrorKind kind) {
  switch (kind) {
    case ErrorKind::Timeout:
      return 'T';
    case ErrorKind::Store:
      return 'S';
    case ErrorKind::Network:
      return 'N';
    default:
      return 'B';
  }
}

std::optional<ErrorKind> kindOf(char letter) {
  switch (letter) {
    case 'T':
      return ErrorKind::Timeout;
    case 'S':
      return ErrorKind::Store;
    case 'N':
      return ErrorKind::Network;
    case 'B':
      return ErrorKind::Backend;
    default:
      return std::nullopt;
  }
}

/// Replaces bytes that are not UTF-8, such as the rest of a cut character, by question marks.
void replaceForeign(std::string& text) {
  for (std::size_t at = 0; at < text.size();) {
    const std::size_t length = utf8SequenceAt(text, at);
    if (length == 0) text[at] = '?';
    at += std::max<std::size_t>(length, 1);
  }
}

/// The format: a letter for the kind, the time in decimal, a space, the text.
std::optional<ToldFault> parse(const std::string& value) {
  const auto space = value.find(' ');
  if (space == std::string::npos || space < 2 || space > 20 || space + 1 == value.size()) {
    return std::nullopt;
  }
  const auto kind = kindOf(value[0]);
  const std::string time = value.substr(1, space - 1);
  if (!kind || time.find_first_not_of("0123456789") != std::string::npos) return std::nullopt;
  ToldFault fault{*kind, value.substr(space + 1, kLongest),
                  std::strtoll(time.c_str(), nullptr, 10)};
  for (char& c : fault.text) {
    if (std::iscntrl(static_cast<unsigned char>(c)) != 0) c = ' ';
  }
  replaceForeign(fault.text);
  return fault;
}

}  // namespace

std::int64_t millisSince1970() {
  const auto now = std::chrono::system_clock::now().time_since_epoch();
  return std::chrono::duration_cast<std::chrono::milliseconds>(now).count();
}

std::string faultKey(const std::string& hash) {
  return "fastcoll/f/" + hash;
}

std::string faultKey(std::uint64_t nonce) {
  return concat("fastcoll/f/", nonce);
}

std::optional<ToldFault> readFault(KeyValueStore& store, const std::string& key) {
  std::string value;
  if (!store.tryGet(key, value)) return std::nullopt;
  return parse(value);
}

ToldFault writeFault(KeyValueStore& store, const std::string& key, const ToldFault& fault) {
  const std::string mine =
      concat(letterOf(fault.kind), millisSince1970(), ' ', fault.text.substr(0, kLongest));
  return parse(store.setFirst(key, mine)).value_or(fault);
}

}  // namespace fastcoll
