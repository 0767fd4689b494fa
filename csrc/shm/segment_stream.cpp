#include "shm/segment_stream.hpp"

#include <algorithm>
#include <utility>

#include "base/interrupt.hpp"
#include "base/log.hpp"
#include "base/topology.hpp"

namespace fastcoll {
namespace {
constexpr std::size_t kLine = 64;
constexpr int kEqualCalls = 20;  // after which equal gradients are reported
}  // namespace

SegmentStream::SegmentStream(GroupMemory& memory, std::vector<int> members, bool sharedCache,
                             std::size_t ringBytes, int spinMicros, StoresChoice stores)
    : memory_(memory),
      members_(std::move(members)),
      rank_(static_cast<int>(std::ranges::find(members_, memory.rank()) - members_.begin())),
      sharedCache_(sharedCache),
      ringBytes_(ringBytes),
      spinMicros_(spinMicros),
      stores_(stores, ringBytes),
      compared_(members_.size(), 0) {
  for (int step = 1; step < size(); ++step) others_.push_back((rank_ + step) % size());
}

ErrorSite SegmentStream::site() const {
  return errorSite(collectiveName(signature_.collective), memory_.identity(), signature_.seq);
}

void SegmentStream::begin(const Signature& signature,
                          const std::vector<std::uint64_t>& expectedCount, const Offer& offer,
                          const std::uint64_t* splits, std::optional<TimePoint> deadline,
                          Milliseconds timeout) {
  signature_ = signature;
  hash_ = hashOf(signature, signature.count);
  expectedCount_ = expectedCount;
  deadline_ = deadline;
  timeout_ = timeout;
  large_ = false;
  std::ranges::fill(compared_, std::uint8_t{0});
  if (memory_.aborted()) memory_.throwAborted(site());
  ControlBlock& own = memory_.own();
  own.signatures[collectives_ % 2].signature = signature_;
  ArrivalLine& arrival = arrivalIn(own);
  arrival.hash = hash_;
  arrival.offer = offer;
  if (splits != nullptr) {
    std::copy(splits, splits + 2 * size(), own.splits(collectives_));
  }
}

Segment SegmentStream::reserve(std::size_t bytes, bool large) {
  const std::size_t need = std::max<std::size_t>(kLine, (bytes + kLine - 1) / kLine * kLine);
  // Once large, always large within a collective: the large segments in flight exceed the small
  // ring. Readers write into the large ring only: see giveBack().
  large_ = large_ || large || need > ControlBlock::kSmallSegmentBytes;
  const bool inLine = !large_ && bytes <= ArrivalLine::kPayloadBytes && reserved_ == next_;
  const std::size_t ring = large_ ? ringBytes_ : ControlBlock::kSmallRingBytes;
  const std::size_t offset = reserved_ % ring;
  if (offset + need > ring) reserved_ += ring - offset;  // a segment lies in one piece
  const Segment segment{reserved_, reserved_ + need, large_, inLine};
  reserved_ += need;
  return segment;
}

void SegmentStream::openLargeRing() {
  ControlBlock& own = memory_.own();
  if (own.largeRing.load(std::memory_order_relaxed) != 0) return;
  try {
    const std::uint64_t offset = memory_.arena().allocate(ringBytes_);
    own.largeRing.store(offset, std::memory_order_release);
  } catch (const Error& error) {
    // The peers wait for this rank's first segment, so record why it never comes.
    fail(error.kind(), concat("rank ", memory_.rank(), ": ", error.what()));
  }
}

void SegmentStream::end() {
  next_ = reserved_;
  ++collectives_;
  if (signature_.gradientsBefore != 0) countEqualGradients();
  readers_ = 0;
  // After another rank's fault, the memory just read may have been freed before the read.
  if (memory_.aborted()) memory_.throwAborted(site());
}

std::uint8_t* SegmentStream::acquire(const Segment& segment) {
  if (segment.inLine) return memoryOf(segment);  // all peers have left the collective before last
  const std::size_t ring = segment.large ? ringBytes_ : ControlBlock::kSmallRingBytes;
  if (segment.end > ring) awaitConsumed(segment.end - ring);
  if (segment.large) openLargeRing();
  return memoryOf(segment);
}

std::uint8_t* SegmentStream::memoryOf(const Segment& segment) {
  ControlBlock& own = memory_.own();
  if (segment.inLine) return arrivalIn(own).payload;
  if (!segment.large) return own.smallRing() + segment.begin % ControlBlock::kSmallRingBytes;
  return memory_.arena().base() + own.largeRing.load(std::memory_order_relaxed) +
         segment.begin % ringBytes_;
}

void SegmentStream::awaitConsumed(std::uint64_t position) {
  if (position <= consumedByAll_) return;
  std::uint64_t least = ~std::uint64_t{0};
  for (const int peer : others_) {
    // Within a collective, compare first: a rank that runs another one never consumes this one's.
    if (position > next_ && compared_[peer] == 0) awaitArrival(peer);
    ControlBlock& theirs = block(peer);
    wait(peer, theirs, theirs.progress.consumed, position);
    least = std::min(least, theirs.progress.consumed.load(std::memory_order_acquire));
  }
  consumedByAll_ = least;
}

std::uint8_t* SegmentStream::awaitConsumed(const Segment& segment) {
  awaitConsumed(segment.end);
  return memoryOf(segment);
}

void SegmentStream::publish(const Segment& segment) {
  ControlBlock& own = memory_.own();
  Progress& progress = own.progress;
  if (progress.published.load(std::memory_order_relaxed) > next_) {
    return publishWord(progress.published, progress.waiters, segment.end);
  }
  // The first one of the collective: peers wait for the arrival.
  progress.published.store(segment.end, std::memory_order_release);
  publishWord(arrivalIn(own).position, progress.waiters, segment.end);
}

void SegmentStream::consume(const Segment& segment) {
  Progress& progress = memory_.own().progress;
  publishWord(progress.consumed, progress.waiters, segment.end);
}

/// Waits until a position in the peer's block is at least `target`.
void SegmentStream::wait(int peer, ControlBlock& block, const std::atomic<std::uint64_t>& word,
                         std::uint64_t target) {
  awaited_ = peer;
  waitOn(word, block.progress.waiters, target, spinMicros_, *this);
}

void SegmentStream::awaitArrival(int peer) {
  ControlBlock& theirs = block(peer);
  wait(peer, theirs, arrivalIn(theirs).position, next_ + 1);
  compare(peer);
}

void SegmentStream::awaitArrivals() {
  for (const int peer : others_) {
    if (compared_[peer] == 0) awaitArrival(peer);
  }
}

void SegmentStream::awaitPublished(int peer, const Segment& segment) {
  // Ranks that disagree may place other segments: compare before waiting for this one.
  if (compared_[peer] == 0) awaitArrival(peer);
  ControlBlock& theirs = block(peer);
  if (arrivalIn(theirs).position.load(std::memory_order_acquire) >= segment.end) return;
  wait(peer, theirs, theirs.progress.published, segment.end);
}

std::uint8_t* SegmentStream::await(int peer, const Segment& segment) {
  awaitPublished(peer, segment);
  ControlBlock& theirs = block(peer);
  if (segment.inLine) return arrivalIn(theirs).payload;
  if (!segment.large) return theirs.smallRing() + segment.begin % ControlBlock::kSmallRingBytes;
  const std::uint64_t ring = theirs.largeRing.load(std::memory_order_acquire);
  return memory_.inPeer(memberOf(peer), ring, ringBytes_) + segment.begin % ringBytes_;
}

void SegmentStream::withdraw(const void* data, std::size_t bytes) noexcept {
  if (memory_.arena().withdraw(data, bytes)) return;
  log(LogLevel::Warn, site(),
      "there is no memory to move the tensor out of shared memory after a fault. "
      "A rank that has not noticed the fault yet may still write into it.");
}

void SegmentStream::compare(int peer) {
  const std::uint64_t expected = expectedCount_.empty() ? signature_.count : expectedCount_[peer];
  const std::uint64_t hash = expected == signature_.count ? hash_ : hashOf(signature_, expected);
  compared_[peer] = 1;
  if (readers_ > 0) checkOperands(block(peer));
  if (signature_.gradientsBefore != 0) {
    const Signature& theirs = block(peer).signatures[collectives_ % 2].signature;
    equalGradients_ += theirs.gradientsBefore == signature_.gradientsBefore ? 1 : 0;
  }
  if (arrivalIn(block(peer)).hash == hash) return;
  const Signature theirs = block(peer).signatures[collectives_ % 2].signature;
  if (agree(signature_, theirs, expected)) {
    if (sameResults(signature_, theirs)) return;
    failResults();
  }
  std::string mine = describe(signature_);
  if (expected != signature_.count) {
    mine += concat(" (which expects ", expected, " elements from it)");
  }
  fail(ErrorKind::Backend,
       mismatched(memory_.rank(), mine, memberName(peer), describe(theirs)) + kSameOrder);
}

bool SegmentStream::shouldStop() {
  try {
    checkInterrupt();
  } catch (...) {
    // The collective ends half-way, so no rank can use the group any more.
    memory_.abort(ErrorKind::Backend,
                  concat(memory_.memberName(memory_.rank()), " was interrupted in ",
                         describe(signature_), kReadLog));
    throw;
  }
  if (memory_.aborted()) return true;
  if (checkLostPeers()) return true;
  const auto now = Clock::now();
  if (now >= firstDeadline() && now >= deadlineAfter(firstDeadline(), patience())) {
    stopKind_ = ErrorKind::Timeout;
    stopCause_ = timedOut(signature_, timeout_, lateRanks());
    return true;
  }
  return false;
}

/// The deadline, before any extension.
TimePoint SegmentStream::firstDeadline() {
  if (!deadline_) deadline_ = deadlineAfter(Clock::now(), timeout_);
  return *deadline_;
}

// A peer that died or left ends the wait if it is the awaited one, or if it has not arrived. A peer
// that died after it published all that this rank needs does not.
bool SegmentStream::checkLostPeers() {
  for (int peer = 0; peer < size(); ++peer) {
    if (peer == rank() || (peer != awaited_ && hasArrived(peer))) continue;
    const bool lost = memory_.isDead(memberOf(peer)) || memory_.hasLeft(memberOf(peer));
    // It may have arrived between the two reads.
    if (!lost || (peer != awaited_ && hasArrived(peer))) continue;
    stopKind_ = ErrorKind::Backend;
    stopCause_ = memory_.causeOfSilence(memberOf(peer), describe(signature_));
    return true;
  }
  return false;
}

/// The extension of the deadline; see setGrace().
Milliseconds SegmentStream::patience() const {
  Milliseconds time = 2 * grace_;
  for (int peer = 0; peer < size(); ++peer) {
    if (peer == rank()) continue;
    const bool behind = completedBy(peer) <= completedBy(rank());
    if (behind && isStopped(stateOf(peer))) return Milliseconds{0};
    if (hasArrived(peer)) continue;
    if (completedBy(peer) >= completedBy(rank())) return Milliseconds{0};  // the peer is late
    time = 3 * grace_;
  }
  return time;
}

std::string SegmentStream::lateRanks() const {
  std::string absent;
  std::string stalled;
  for (int peer = 0; peer < size(); ++peer) {
    if (peer == rank()) continue;
    const char state = stateOf(peer);
    std::string who = concat(memberName(peer), ", last completed seq ", completedBy(peer),
                             ", state ", state, isStopped(state) ? " (stopped)" : "");
    if (!hasArrived(peer)) {
      absent += (absent.empty() ? "" : "; ") + who;
    } else if (peer == awaited_) {
      stalled = who;
    }
  }
  if (!absent.empty()) return "not arrived: " + absent;
  return "all ranks arrived, still waiting for " + stalled;
}

void SegmentStream::throwStopReason() {
  if (memory_.aborted()) {
    memory_.passOn();  // the rank that recorded it here may have died before it reached all
    memory_.throwAborted(site());
  }
  fail(stopKind_, stopCause_);
}

/// Waits for all peers, so that the majority shows which rank is apart.
void SegmentStream::failResults() {
  RanksByDigest ranks;
  for (int peer = 0; peer < size(); ++peer) {
    ControlBlock& theirs = block(peer);
    if (peer != rank_) wait(peer, theirs, arrivalIn(theirs).position, next_ + 1);
    ranks[theirs.signatures[collectives_ % 2].signature.resultBefore].push_back(memberOf(peer));
  }
  const auto name = [this](int rank) { return memory_.memberName(rank); };
  fail(ErrorKind::Backend, differentResults(completed_, ranks, name));
}

void SegmentStream::announceOperands(const std::vector<std::uint64_t>& read, std::uint64_t own) {
  operands_ = read;
  operands_[rank_] -= own;
  std::uint64_t* const announced = memory_.own().operands(collectives_);
  std::ranges::copy(operands_, announced);
  announced[size()] = collectives_ + 1;
  readers_ = size() - 1;
}

/// Peers without digests announce nothing.
void SegmentStream::checkOperands(ControlBlock& theirs) {
  const std::uint64_t* const announced = theirs.operands(collectives_);
  if (announced[size()] != collectives_ + 1) return;
  for (int place = 0; place < size(); ++place) operands_[place] += announced[place];
  if (--readers_ > 0) return;
  const auto changed = std::ranges::find_if(operands_, [](auto sum) { return sum != 0; });
  if (changed == operands_.end()) return;
  const auto place = static_cast<int>(changed - operands_.begin());
  fail(ErrorKind::Backend, changedOperand(completed_, memberName(place)));
}

void SegmentStream::countEqualGradients() {
  const bool all = std::exchange(equalGradients_, 0) == size() - 1;
  if (equalCalls_ == kEqualCalls) return;  // once
  equalCalls_ = all ? equalCalls_ + 1 : 0;
  if (equalCalls_ != kEqualCalls || rank_ != 0) return;
  log(LogLevel::Warn, site(), "the ranks of this host gave equal gradients to ", kEqualCalls,
      " all_reduces in a row. Does each rank read its own part of the data, as with a "
      "DistributedSampler?");
}

void SegmentStream::fail(ErrorKind kind, const std::string& cause) {
  memory_.abort(kind, cause);
  memory_.throwAborted(site());
}

}  // namespace fastcoll
