// The digests of a group's collectives on CPU tensors (FASTCOLL_DIGEST).
//
// Each collective's inputs and outputs are digested before and after it runs, in a pass of its own.
// So the digest is of what the program gave and got, whatever algorithm moved it, and has the same
// value in each. The next collective of the group announces that of a result which all ranks have,
// with its signature (Signature::resultBefore). So ranks compare results without a message more.
#pragma once

#include "base/settings.hpp"
#include "cpu/algorithms/algorithm.hpp"
#include "trace/record.hpp"

namespace fastcoll {

/// Used by the thread that runs the group's collectives.
class GroupDigests {
 public:
  explicit GroupDigests(DigestsOf of) : of_(of) {}

  bool areOn() const { return of_ != DigestsOf::Nothing; }
  /// Begins a call, which runs one request or more.
  void begin() { call_ = {}; }
  /// Before a request runs: digests its inputs, and announces the request before.
  void before(Request& request);
  /// After it has run: digests its outputs.
  void after(const Request& request);
  /// Of the call.
  trace::Digests ofCall() const { return call_; }

 private:
  bool covers(const Request& request) const;

  const DigestsOf of_;
  trace::Digests call_;
  std::uint64_t input_ = 0;      // of the present request
  std::uint64_t result_ = 0;     // of the last request, if all ranks have it; else 0
  std::uint64_t gradients_ = 0;  // of its input, if that may be gradients; else 0
};

}  // namespace fastcoll
