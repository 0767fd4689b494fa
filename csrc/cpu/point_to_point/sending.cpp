// The sending end of point-to-point: writes messages as records, and reads answers. All of it runs
// under PointToPoint's lock and never waits; see pair_channel.hpp for the protocol.
#include <algorithm>
#include <utility>

#include "base/log.hpp"
#include "cpu/point_to_point/point_to_point.hpp"

namespace fastcoll {

bool PointToPoint::advanceSends(int rank) {
  Peer& peer = peers_[rank];
  if (!peer.out) {
    if (peer.sends.empty() || !memory_.isOpen()) return false;
    const std::uint64_t offset =
        memory_.allocate(sizeof(PairChannel), GroupMemory::Use::Write, rank);
    peer.outChannel = reinterpret_cast<PairChannel*>(memory_.arena().base() + offset);
    peer.out.emplace(*peer.outChannel, peer.cells);
    memory_.own().link(rank).channel.store(offset, std::memory_order_release);
  }
  const bool moved = readAnswers(peer);
  bool begun = false;
  std::size_t budget = kTurnBytes;
  while (!peer.sends.empty() && budget > 0) {
    const PointToPointRef op = peer.sends.front();
    if (!op->begun_) {
      if (!begin(rank, *op)) break;
      begun = true;
    }
    if (!writePieces(peer, *op, op->unasked_, budget)) break;
    peer.sends.pop_front();
    if (op->moved_ == op->message.bytes()) {
      finish(op);
    } else {
      peer.asking.push_back(op);
    }
  }
  while (!peer.answered.empty() && budget > 0) {
    const PointToPointRef op = peer.answered.front();
    if (!writePieces(peer, *op, op->message.bytes(), budget)) break;
    peer.answered.pop_front();
    finish(op);
  }
  const bool wrote = begun || budget < kTurnBytes;
  if (wrote) wake(rank);
  return moved || wrote;
}

bool PointToPoint::readAnswers(Peer& peer) {
  PointToPointOp* const begun =
      !peer.sends.empty() && peer.sends.front()->begun_ ? peer.sends.front().get() : nullptr;
  if (peer.asking.empty() && begun == nullptr) return false;
  PairChannel& channel = *peer.outChannel;
  const std::uint64_t answered = channel.answered.load(std::memory_order_acquire);
  std::uint64_t read = channel.answersRead.load(std::memory_order_relaxed);
  if (read == answered) return false;
  for (; read != answered; ++read) {
    const std::uint64_t number =
        channel.answers[read % PairChannel::kAnswers].load(std::memory_order_relaxed);
    if (begun != nullptr && begun->number_ == number) {
      // The receiver answered before the eager part was written, so all of the message may go.
      begun->unasked_ = begun->message.bytes();
      continue;
    }
    const auto found =
        std::ranges::find_if(peer.asking, [&](const auto& op) { return op->number_ == number; });
    if (found == peer.asking.end()) {
      throw Error(ErrorKind::Backend, "internal error: a peer acknowledged message ", number,
                  ", which needs no acknowledgement", kReportThis);
    }
    const PointToPointRef op = *found;
    peer.asking.erase(found);
    if (inArena(op->message) != 0) {
      finish(op);
    } else {
      peer.answered.push_back(op);
    }
  }
  channel.answersRead.store(read, std::memory_order_release);
  return true;
}

/// Offset of the message in the arena if its receiver is to read it there, else 0.
std::uint64_t PointToPoint::inArena(const Message& message) const {
  const std::size_t bytes = message.bytes();
  if (bytes <= kCopiedBytes) return 0;
  const std::uint8_t* data = message.contiguous(0, bytes);
  return data == nullptr ? 0 : memory_.arena().offsetOf(data, bytes);
}

/// Writes a message's first record; false when there is no room yet.
bool PointToPoint::begin(int rank, PointToPointOp& op) {
  Peer& peer = peers_[rank];
  const std::size_t bytes = op.message.bytes();
  RecordHead head = headOf(op);
  head.where = inArena(op.message);
  if (head.where == 0 && bytes > PairChannel::kSmallBytes) {
    if (!useLargeRing(rank)) return false;
    const bool full = peer.outChannel->full.load(std::memory_order_relaxed) != 0;
    const std::size_t half = peer.large ? ringBytes_ / 2 : PairChannel::kSmallBytes;
    op.unasked_ = full ? 0 : std::min({bytes, kEagerBytes, half});
    head.length = static_cast<std::uint32_t>(std::min(op.unasked_, pieceBytes(peer)));
  } else if (head.where == 0) {
    op.unasked_ = bytes;
    head.length = static_cast<std::uint32_t>(bytes);
  }
  head.asks = op.unasked_ < bytes;
  if (!peer.out->fits(head.length)) return false;
  if (head.length > PairChannel::kSmallBytes) head.cell = peer.cells.take();
  peer.out->write(head, op.message, 0);
  noteBegun(peer, op);
  op.moved_ = head.length;
  return true;
}

RecordHead PointToPoint::headOf(const PointToPointOp& op) {
  return {
      .kind = RecordHead::kMessage, .tag = op.tag, .dtype = op.dtype, .bytes = op.message.bytes()};
}

/// The message's first record is written.
void PointToPoint::noteBegun(Peer& peer, PointToPointOp& op) {
  op.number_ = peer.sent++;
  op.begun_ = true;
  trace::start(op.trace);
}

/// Moves the channel to the large ring; false until the small one is empty. If no memory is left
/// for it, long messages go through the small ring.
bool PointToPoint::useLargeRing(int rank) {
  Peer& peer = peers_[rank];
  if (peer.large) return true;
  if (!peer.out->fits(0)) return false;
  const auto allocated = [&](std::size_t bytes, GroupMemory::Use use) -> std::uint64_t {
    if (bytes == 0) return 0;
    try {
      const std::uint64_t offset = memory_.allocate(bytes, use, rank);
      mapNow(memory_.arena().base() + offset, bytes);
      return offset;
    } catch (const Error& error) {
      if (!std::exchange(peer.refused, true)) {
        log(LogLevel::Warn, "messages to rank ", rank, " are slow: ", error.what());
      }
      return 0;
    }
  };
  const std::uint64_t offset = allocated(ringBytes_, GroupMemory::Use::Read);
  if (offset == 0) return true;
  std::uint8_t* const base = memory_.arena().base();
  if (const auto cells =
          allocated(PairCells::blockBytes(ringBytes_), GroupMemory::Use::WriteLate)) {
    peer.cells.addOwn(base + cells, PairCells::countFor(ringBytes_));
    peer.outChannel->cells.store(cells, std::memory_order_relaxed);
  }
  peer.out->move(base + offset, ringBytes_, offset, RingStores(setup_.stores, ringBytes_));
  peer.large = true;
  return true;
}

std::size_t PointToPoint::pieceBytes(const Peer& peer) const {
  return peer.large ? std::min(PairCells::kBytes, ringBytes_ / 4) : PairChannel::kSmallBytes;
}

/// Writes pieces of the message up to `end`; false when there is more to write than room or budget.
bool PointToPoint::writePieces(Peer& peer, PointToPointOp& op, std::size_t end,
                               std::size_t& budget) {
  RecordHead head{.kind = RecordHead::kPiece, .where = op.number_};
  while (op.moved_ < end) {
    const std::size_t take = std::min(pieceBytes(peer), end - op.moved_);
    if (budget == 0 || !peer.out->fits(take)) return false;
    head.length = static_cast<std::uint32_t>(take);
    head.cell = 0;
    if (take > PairChannel::kSmallBytes) head.cell = peer.cells.take();
    peer.out->write(head, op.message, op.moved_);
    op.moved_ += take;
    budget -= std::min(budget, take);
  }
  return true;
}

}  // namespace fastcoll
