// One exception type for every floor below the process group. The process group
// (csrc/process_group*) translates its kind into the Python exception class that torch users catch.
#pragma once

#include <sstream>
#include <stdexcept>
#include <string>

namespace fastcoll {

enum class ErrorKind {
  Value,    // the caller's arguments: ValueError
  Type,     // the caller's types: TypeError
  Backend,  // a run-time fault of the group: torch.distributed.DistBackendError
  Timeout,  // a deadline passed: torch.distributed.DistBackendError with the word "timed out"
  Store,    // rendezvous data are bad or missing: torch.distributed.DistStoreError
  Network,  // the store or a host cannot be reached: torch.distributed.DistNetworkError
};

class Error : public std::runtime_error {
 public:
  Error(ErrorKind kind, const std::string& what) : std::runtime_error(what), kind_(kind) {}
  ErrorKind kind() const { return kind_; }

 private:
  ErrorKind kind_;
};

/// Joins its arguments with operator<<.
template <typename... Parts>
std::string concat(const Parts&... parts) {
  std::ostringstream out;
  (out << ... << parts);
  return out.str();
}

}  // namespace fastcoll
