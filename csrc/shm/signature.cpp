#include "shm/signature.hpp"

#include <algorithm>
#include <bit>

#include "base/error.hpp"

namespace fastcoll {
namespace {

constexpr char kFindWriter[] =
    ". Look for code that writes to the tensor while the call runs, and for faulty memory. With "
    "FASTCOLL_TRACE_STACKS=1, `fastcoll trace` shows the line of the call.";

}  // namespace

std::string describe(const Signature& signature) {
  std::string text = concat(collectiveName(signature.collective), "(seq ", signature.seq);
  if (signature.collective != Collective::Barrier) {
    text += concat(", ", dtypeName(signature.dtype), "[", signature.count, "]",
                   signature.wire == Wire::None ? "" : " on the wire",
                   signature.wire == Wire::KeepsOrder ? " with FASTCOLL_ORDER=fixed" : "");
  }
  if (signature.op != ReduceOp::None) text += concat(", ", reduceOpName(signature.op));
  if (signature.op == ReduceOp::PreMulSum) text += concat(" by ", signature.factor);
  if (signature.root >= 0) text += concat(", root ", signature.root);
  return text + ")";
}

std::string mismatched(int rank, const std::string& mine, const std::string& member,
                       const std::string& theirs) {
  return concat("Detected mismatch between collectives on ranks: rank ", rank, " runs ", mine, ", ",
                member, " runs ", theirs);
}

std::string splitMismatch(const Signature& signature, int from, int to, std::uint64_t sent,
                          std::uint64_t expected) {
  return concat("Detected mismatch between collectives on ranks: in ", describe(signature),
                " rank ", to, " expects ", expected, " bytes from rank ", from, ", which sends ",
                sent, ". Give each rank the output splits that match its peers' input splits.");
}

std::string timedOut(const Signature& signature, Milliseconds timeout, const std::string& late) {
  return concat("Timed out after ", timeout.count(), " ms in ", describe(signature), "; ", late,
                kFindDelay);
}

bool agree(const Signature& mine, const Signature& theirs, std::uint64_t expected) {
  // all_to_all compares the bytes of each pair itself: the counts may differ.
  const bool counts = theirs.count == expected || mine.collective == Collective::AllToAll;
  const bool factors = theirs.factor == mine.factor ||
                       (theirs.factor != theirs.factor && mine.factor != mine.factor);  // NaN
  return theirs.seq == mine.seq && theirs.collective == mine.collective &&
         theirs.dtype == mine.dtype && theirs.wire == mine.wire && theirs.op == mine.op &&
         theirs.root == mine.root && counts && factors;
}

bool sameResults(const Signature& mine, const Signature& theirs) {
  return mine.resultBefore == theirs.resultBefore || mine.resultBefore == 0 ||
         theirs.resultBefore == 0;
}

std::string differentResults(const Signature& signature, const RanksByDigest& ranks,
                             const std::function<std::string(int)>& name) {
  const auto fewer = [](const auto& a, const auto& b) { return a.second.size() < b.second.size(); };
  const auto most = std::ranges::max_element(ranks, fewer);
  const bool isMajority = std::ranges::count(ranks, most->second.size(), [](const auto& digest) {
                            return digest.second.size();
                          }) == 1;
  std::string apart, others;
  for (auto at = ranks.begin(); at != ranks.end(); ++at) {
    for (const int rank : at->second) {
      std::string& text = isMajority && at == most ? others : apart;
      text += concat(text.empty() ? "" : ", ", name(rank));
    }
  }
  return concat("the result of ", describe(signature),
                isMajority ? " has other bits on " : " differs between ", apart,
                isMajority ? " than on " : "", others, kFindWriter);
}

std::string changedOperand(const Signature& signature, const std::string& name) {
  return concat("the input of ", name, " to ", describe(signature), " changed during the call",
                kFindWriter);
}

std::uint64_t hashOf(const Signature& signature, std::uint64_t count) {
  const bool counts = signature.collective != Collective::AllToAll;
  const std::uint64_t words[] = {
      signature.seq, counts ? count : 0, std::bit_cast<std::uint64_t>(signature.factor),
      std::uint64_t(std::uint32_t(signature.root)) << 32 |
          std::uint64_t(signature.collective) << 24 | std::uint64_t(signature.dtype) << 16 |
          std::uint64_t(signature.op) << 8 | std::uint64_t(signature.wire)};
  // MurmurHash3's finalizer for each word: a change of one word always changes the hash.
  std::uint64_t hash = 0;
  for (const std::uint64_t word : words) {
    hash = (hash ^ word) * 0xff51afd7ed558ccdull;
    hash ^= hash >> 33;
  }
  if (signature.resultBefore != 0) hash ^= std::rotl(signature.resultBefore, 31);
  return hash;
}

}  // namespace fastcoll
