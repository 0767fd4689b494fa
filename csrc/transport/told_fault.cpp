#include "told_fault.hpp"

#include <cctype>

namespace fastcoll {
namespace {

constexpr std::size_t kLongest = 1000;

// The kinds that one rank's fault may have on another: its bad arguments are not theirs.
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

std::optional<ToldFault> parse(const std::string& value) {
  if (value.size() < 2) return std::nullopt;
  const auto kind = kindOf(value[0]);
  if (!kind) return std::nullopt;
  ToldFault fault{*kind, value.substr(1, kLongest)};
  for (char& c : fault.text) {
    if (std::iscntrl(static_cast<unsigned char>(c)) != 0) c = ' ';
  }
  return fault;
}

}  // namespace

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
  const std::string mine = letterOf(fault.kind) + fault.text.substr(0, kLongest);
  return parse(store.setFirst(key, mine)).value_or(fault);
}

}  // namespace fastcoll
