// The sum over all ranks of a group, made of what hosts have summed up: the same tree over the
// ranks as reduce/reduce.hpp defines, whoever evaluates which part of it.
//
// A block is the widest subtree whose ranks are all on one host. Its sum is a partial result: in
// the accumulate dtype, neither divided nor rounded. Ranks 0 to 3 on one host and 4 to 7 on another
// are two blocks; where ranks take turns, every rank is one, and its operand is its partial result.
// Where the dtype is a wire, of 16 bits, that wider tensors asked for, a partial result is rounded
// to it, once, so that it is as short as they wished: then the bits hang on who shares a host.
#pragma once

#include <cstdint>
#include <vector>

#include "../algorithms/algorithm.hpp"
#include "../algorithms/segment_reduce.hpp"
#include "../group/hosts.hpp"

namespace fastcoll {

/// Ranks [first, first + count) of the group.
struct Block {
  int first;
  int count;
  int host;
  int index;  // among the blocks of its host
};

/// All blocks, in order of their ranks.
std::vector<Block> blocksOf(const Hosts& hosts);

class BlockSum {
 public:
  BlockSum(const Request& request, const Hosts& hosts);

  std::size_t count() const { return blocks_.size(); }
  const Block& block(std::size_t i) const { return blocks_[i]; }
  /// Blocks of a host, and bytes of a partial result that it sends of `bytes` of an operand. A host
  /// of which every block is one rank sends operands of 16 bits as they are.
  std::size_t blocks(int host) const { return of_[host].size(); }
  std::size_t partialBytes(int host, std::size_t bytes) const {
    return isShortOf(host) ? bytes : bytes * widening_;
  }
  /// Bytes of the result of `bytes` of an operand.
  std::size_t resultBytes(std::size_t bytes) const { return bytes * resultWidening_; }
  /// Partial results of the host are of the operands' dtype.
  bool isShortOf(int host) const { return narrowed_ || plain(host); }
  /// Partial results of such a host are the operands themselves.
  bool plain(int host) const { return plain_[host]; }

  /// Sums block `index` of this host: `operands[place]` is the operand of the host's rank there.
  void partial(int index, const std::vector<const std::uint8_t*>& operands, std::size_t bytes,
               std::uint8_t* out);
  /// Sums the partial results of all blocks, of `bytes` of an operand, and writes the result. `out`
  /// may be one of them.
  void total(const std::vector<const std::uint8_t*>& partials, std::size_t bytes,
             std::uint8_t* out);

 private:
  static constexpr std::size_t kStep = 8192;  // bytes of a partial result, in the first-level cache

  struct Part {
    int first, count;
    int block;        // or -1: the sum of the next two
    int left, right;  // parts
  };
  int plan(int first, int count);
  const std::uint8_t* evaluate(int part, std::size_t at, std::size_t bytes, bool last);
  std::uint8_t* temporary(int part) { return temporaries_.data() + part * kStep; }

  const Hosts& hosts_;
  std::vector<Block> blocks_;
  bool narrowed_;  // partial results are rounded
  Request inner_;  // of a partial result
  DType accumulate_;
  std::size_t widening_;  // of a partial result, and of the result
  std::size_t resultWidening_;
  const WireCast* cast_;  // where they widen
  ReduceFn combine_, finish_;
  double divisor_;
  std::vector<std::vector<Block>> of_;
  std::vector<bool> plain_;
  std::vector<SegmentReducer> reducers_;  // of this host's blocks
  std::vector<int> places_;               // where each of them begins among the host's ranks
  std::vector<Part> parts_;
  int root_;
  bool even_;  // the blocks are the leaves of a tree of the same form
  std::vector<std::uint8_t> temporaries_;
  std::vector<const void*> sources_;
  const std::vector<const std::uint8_t*>* partials_ = nullptr;
};

}  // namespace fastcoll
