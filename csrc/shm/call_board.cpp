#include "shm/call_board.hpp"

#include <algorithm>
#include <bit>
#include <cstring>

#include "shm/segment_stream.hpp"

namespace fastcoll {
namespace {

/// The history after a line. hashOf() takes the seq too, and here a rank's lines are counted
/// instead: messages, which not all ranks make, have no line.
std::uint64_t historyAfter(std::uint64_t before, std::uint64_t number, Signature signature,
                           std::uint64_t others) {
  signature.seq = number;
  return (hashOf(signature, signature.count) ^ std::rotl(before, 17) ^ others) *
         0x9e3779b97f4a7c15ull;
}

}  // namespace

std::uint64_t CallBoard::post(const Signature& signature, std::uint64_t others) {
  Line line{0, 0, signature};
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    const std::uint64_t before = count_ == 0 ? 0 : kept_[count_ % kKept].history;
    line.number = ++count_;
    line.history = historyAfter(before, line.number, signature, others);
    kept_[count_ % kKept] = line;
  }
  // A reader takes a line only if its number is the same before and after. Release: a reader of a
  // new word then also reads that the number has changed.
  CallLines& calls = memory_.own().calls;
  CallLine& shared = calls.lines[line.number % CallLines::kLines];
  shared.number.store(0, std::memory_order_relaxed);
  shared.history.store(line.history, std::memory_order_release);
  std::array<std::uint64_t, CallLine::kWords> words{};
  std::memcpy(words.data(), &signature, sizeof signature);
  for (std::size_t i = 0; i < words.size(); ++i) {
    shared.signature[i].store(words[i], std::memory_order_release);
  }
  shared.number.store(line.number, std::memory_order_release);
  calls.count.store(line.number, std::memory_order_release);
  return line.number;
}

std::optional<CallBoard::Line> CallBoard::ownLine(std::uint64_t number) const {
  const std::lock_guard<std::mutex> lock(mutex_);
  const Line& line = kept_[number % kKept];
  return line.number == number && number <= count_ ? std::optional(line) : std::nullopt;
}

std::optional<CallBoard::Line> CallBoard::lineOf(int peer, std::uint64_t number) const {
  const CallLine& shared = memory_.block(peer).calls.lines[number % CallLines::kLines];
  Line line;
  line.number = shared.number.load(std::memory_order_acquire);
  line.history = shared.history.load(std::memory_order_acquire);
  std::array<std::uint64_t, CallLine::kWords> words{};
  for (std::size_t i = 0; i < words.size(); ++i) {
    words[i] = shared.signature[i].load(std::memory_order_acquire);
  }
  const bool same = shared.number.load(std::memory_order_relaxed) == line.number;
  if (!same || line.number != number) return std::nullopt;
  std::memcpy(static_cast<void*>(&line.signature), words.data(), sizeof line.signature);
  return line;
}

std::string CallBoard::lastOf(int peer) const {
  const std::uint64_t count = countOf(peer);
  const auto line = count == 0 ? std::nullopt : lineOf(peer, count);
  return line ? describe(line->signature) : "";
}

std::optional<std::string> CallBoard::mismatch() {
  for (const int peer : members_) {
    if (peer == memory_.rank()) continue;
    const std::uint64_t number = std::min(countOf(peer), ownCount());
    if (number <= compared_[peer]) continue;
    // A rank that has neither line leaves it to the other one, or to a later comparison.
    const auto mine = ownLine(number), theirs = lineOf(peer, number);
    if (!mine || !theirs) continue;
    if (mine->history != theirs->history) return difference(peer, number);
    compared_[peer] = number;
  }
  return std::nullopt;
}

/// Names the first line that differs, as far as both ranks still have it; they differ at `number`.
std::string CallBoard::difference(int peer, std::uint64_t number) const {
  Line mine = ownLine(number).value_or(Line{}), theirs = lineOf(peer, number).value_or(Line{});
  bool isFirst = number == compared_[peer] + 1;
  while (!isFirst) {
    const auto here = ownLine(number - 1), there = lineOf(peer, number - 1);
    if (!here || !there) break;
    isFirst = here->history == there->history;
    if (isFirst) break;
    mine = *here;
    theirs = *there;
    isFirst = --number == compared_[peer] + 1;
  }
  const std::uint64_t seq = theirs.signature.seq;
  theirs.signature.seq = mine.signature.seq;
  const bool alike = agree(mine.signature, theirs.signature, mine.signature.count);
  theirs.signature.seq = seq;
  const std::uint64_t ago = ownCount() - number;
  return concat(mismatched(memory_.rank(), describe(mine.signature), memory_.memberName(peer),
                           describe(theirs.signature)),
                alike ? " with other parts" : "", isFirst ? ", " : ", or differed before, ", ago,
                ago == 1 ? " call ago" : " calls ago", kSameOrder);
}

}  // namespace fastcoll
