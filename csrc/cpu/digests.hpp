// The digests of a group's collectives on CPU tensors (FASTCOLL_DIGEST).
//
// Each collective's inputs and outputs are digested before and after it runs, in a pass of its own.
// So the digest is of what the program gave and got, whatever algorithm moved it, and has the same
// value in each. The next collective of the group announces that of a result which all ranks have,
// with its signature (Signature::resultBefore). So ranks compare results without a message more.
//
// A wrong operand of a sum gives all ranks the same wrong result. So a rank that reads operands of
// its host digests them too, and announces these digests. Each rank compares their sum with the
// digest of its input.
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
  /// Before a request runs: digests its inputs, and announces the request before. `stream`: where
  /// it runs, if all ranks are on one host, else nullptr.
  void before(Request& request, SegmentStream* stream);
  /// After it has run: digests its outputs.
  void after(const Request& request);
  /// Of the call.
  trace::Digests ofCall() const { return call_; }

 private:
  bool covers(const Request& request) const;

  const DigestsOf of_;
  trace::Digests call_;
  std::uint64_t input_ = 0;          // of the present request
  std::uint64_t result_ = 0;         // of the last request, if all ranks have it; else 0
  std::uint64_t gradients_ = 0;      // of its input, if that may be gradients; else 0
  std::uint64_t operand_ = 0;        // of its input, if `read_` is not empty
  std::uint64_t part_ = 0;           // which of its messages they are of
  std::vector<std::uint64_t> read_;  // of the operands that this rank read in it
};

}  // namespace fastcoll
