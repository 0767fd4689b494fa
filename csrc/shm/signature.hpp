// How ranks compare their signatures of a collective, and the causes of errors that name them.
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <string>
#include <vector>

#include "base/clock.hpp"
#include "shm/control_block.hpp"

namespace fastcoll {

/// Whether two ranks' signatures describe the same collective; `expected` is the count that
/// `theirs` must have.
bool agree(const Signature& mine, const Signature& theirs, std::uint64_t expected);

/// Whether the ranks have the same result of the collective before, as far as both have digests.
bool sameResults(const Signature& mine, const Signature& theirs);
/// Ranks by the digest of their result.
using RanksByDigest = std::map<std::uint64_t, std::vector<int>>;
/// The cause of an error if the ranks have different results of the collective with this signature.
std::string differentResults(const Signature& signature, const RanksByDigest& ranks,
                             const std::function<std::string(int)>& name);

/// The cause of an error if the ranks read other bits of a rank's operand, in the collective with
/// this signature, than it had when the call began.
std::string changedOperand(const Signature& signature, const std::string& name);

/// A hash of what agree() and sameResults() compare, with `count` in place of the signature's own.
std::uint64_t hashOf(const Signature& signature, std::uint64_t count);

/// "all_reduce(seq 17, float32[1000], SUM)"
std::string describe(const Signature& signature);

// The causes of errors that a stream and the connections between hosts share.
/// `mine`, `theirs`: what the rank and the member of that name run. Add the remedy, kSameOrder.
std::string mismatched(int rank, const std::string& mine, const std::string& member,
                       const std::string& theirs);
inline constexpr char kSameOrder[] =
    ". All ranks must issue the same collectives in the same order.";
/// Both ends of a pair announced different bytes.
std::string splitMismatch(const Signature& signature, int from, int to, std::uint64_t sent,
                          std::uint64_t expected);
/// `late`: which ranks the collective waits for.
std::string timedOut(const Signature& signature, Milliseconds timeout, const std::string& late);

}  // namespace fastcoll
