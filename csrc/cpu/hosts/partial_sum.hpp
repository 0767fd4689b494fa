// The sum over all ranks of a group from partial sums of hosts. It is the same tree over the ranks
// that reduce/reduce.hpp defines, whichever host evaluates which part of it.
//
// A subtree here is the widest whose ranks are all on one host. Its sum is a partial result: in
// the accumulate dtype, neither divided nor rounded. Ranks 0 to 3 on one host and 4 to 7 on another
// are two subtrees. If ranks alternate between hosts, every rank is a subtree, and its operand is
// its partial result. With a 16-bit wire dtype each partial result is rounded to it once, to send
// fewer bytes. In an average over unequal subtrees it is not. The result's bits then depend on
// which ranks share a host.
#pragma once

#include <cstdint>
#include <vector>

#include "cpu/algorithms/algorithm.hpp"
#include "cpu/algorithms/segment_reduce.hpp"
#include "group/hosts.hpp"

namespace fastcoll {

/// Ranks [first, first + count) of the group.
struct Subtree {
  int first;
  int count;
  int host;
  int index;  // among the subtrees of its host
};

/// How the sum of a group is cut into partial results. It depends only on which ranks share a host,
/// so a group makes it once.
struct SumTree {
  SumTree() = default;
  explicit SumTree(const Hosts& hosts);

  struct Part {
    int subtree;      // or -1: the sum of `left` and `right`
    int left, right;  // parts
  };
  std::vector<Subtree> subtrees;         // in order of their ranks
  std::vector<std::vector<Subtree>> of;  // of each host
  std::vector<int> places;               // where each of this host begins among the host's ranks
  std::vector<Part> parts;               // the last one is the sum of all ranks
  bool even = false;                     // all subtrees have as many ranks

 private:
  int add(int first, int count);
};

class PartialSum {
 public:
  PartialSum(const Request& request, const Hosts& hosts, const SumTree& tree);

  std::size_t count() const { return tree_.subtrees.size(); }
  const Subtree& subtree(std::size_t i) const { return tree_.subtrees[i]; }
  /// The number of a host's subtrees; and the bytes of a partial result that it sends for `bytes`
  /// of an operand. A host whose subtrees are all single ranks sends 16-bit operands unchanged.
  std::size_t subtrees(int host) const { return tree_.of[host].size(); }
  std::size_t partialBytes(int host, std::size_t bytes) const {
    return isShortOf(host) ? bytes : bytes * widening_;
  }
  /// Bytes of the result for `bytes` of an operand.
  std::size_t resultBytes(std::size_t bytes) const { return bytes * resultWidening_; }
  /// Whether the host's partial results have the operands' dtype.
  bool isShortOf(int host) const { return narrowed_ || plain(host); }
  /// Whether the host's partial results are the operands themselves.
  bool plain(int host) const { return plain_[host]; }

  /// Sums subtree `index` of this host: `operands[place]` is the operand of the host's rank at
  /// `place`.
  void partial(int index, const std::vector<const std::uint8_t*>& operands, std::size_t bytes,
               std::uint8_t* out);
  /// Sums the partial results of all subtrees, for `bytes` of an operand, and writes the result.
  /// `out` may be one of them, if it has the result's dtype.
  void total(const std::vector<const std::uint8_t*>& partials, std::size_t bytes,
             std::uint8_t* out);

 private:
  static constexpr std::size_t kStep = 8192;  // bytes of a partial result; fits the L1 cache

  const std::uint8_t* evaluate(int part, std::size_t at, std::size_t bytes, bool last,
                               std::uint8_t* out) const;

  const SumTree& tree_;
  const int here_;  // this host
  bool narrowed_;   // partial results are rounded
  Request inner_;   // of a partial result
  DType accumulate_;
  std::size_t widening_;  // bytes per operand byte: of a partial result, and of the result
  std::size_t resultWidening_;
  const WireCast* cast_;  // set for 16-bit dtypes
  ReduceFn combine_, finish_;
  double divisor_;
  std::vector<bool> plain_;
  std::vector<SegmentReducer> reducers_;  // of this host's subtrees
  const std::vector<const std::uint8_t*>* partials_ = nullptr;
};

}  // namespace fastcoll
