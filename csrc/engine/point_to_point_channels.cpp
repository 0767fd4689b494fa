// How point-to-point messages travel: pairing, posting, matching and streaming over the
// PairChannels. Everything here runs under the engine's lock and never waits; see pair_channel.hpp
// for the protocol.
#include <algorithm>
#include <utility>

#include "point_to_point.hpp"

namespace fastcoll {

void PointToPoint::advancePeer(int rank, Finished& finished) {
  Peer& peer = peers_[static_cast<std::size_t>(rank)];
  if (!peer.paired) tryPair(rank);
  advanceSends(rank, finished);  // needs no pairing: the channel is this rank's own memory
  if (peer.paired && peer.in == nullptr) {
    const std::uint64_t offset =
        memory_.block(rank).link(memory_.rank()).channel.load(std::memory_order_acquire);
    if (offset != 0) {
      peer.in = reinterpret_cast<PairChannel*>(memory_.inPeer(rank, offset, sizeof(PairChannel)));
    }
  }
  if (peer.in != nullptr) {
    takeDescriptors(rank, finished);
    drain(rank, finished);
  }
}

void PointToPoint::tryPair(int rank) {
  Peer& peer = peers_[static_cast<std::size_t>(rank)];
  const auto now = Clock::now();
  if (now >= peer.nextTry) {
    peer.paired = rendezvous_.tryPair(rank);
    const int micros = std::min(10000, 100 << std::min(peer.tries++, 7));
    peer.nextTry = now + std::chrono::microseconds(micros);
    if (peer.paired) ring(rank);  // it may wait for what was posted before it could be rung
  }
  if (!peer.paired) unpaired_ = true;
}

void PointToPoint::advanceSends(int rank, Finished& finished) {
  Peer& peer = peers_[static_cast<std::size_t>(rank)];
  if (peer.out == nullptr) {
    if (peer.sends.empty() || !memory_.isOpen()) return;
    const std::uint64_t offset = memory_.arena().allocate(sizeof(PairChannel));
    peer.out = reinterpret_cast<PairChannel*>(memory_.arena().base() + offset);
    memory_.own().link(rank).channel.store(offset, std::memory_order_release);
  }
  PairChannel& channel = *peer.out;
  bool posted = false;
  for (std::size_t i = 0; i < peer.sends.size();) {
    const PointToPointRef op = peer.sends[i];
    if (op->posted_) {
      ++i;
      continue;
    }
    const std::uint64_t number = channel.posted.load(std::memory_order_relaxed);
    if (number - channel.taken.load(std::memory_order_acquire) >= PairChannel::kDescriptors) break;
    auto& descriptor = channel.descriptors[number % PairChannel::kDescriptors];
    const std::size_t bytes = op->message.bytes();
    descriptor.bytes = bytes;
    descriptor.tag = op->tag;
    descriptor.dtype = op->dtype;
    const bool rides = bytes <= PairChannel::kInlineBytes;
    if (rides) op->message.read(0, bytes, descriptor.payload);
    channel.posted.store(number + 1, std::memory_order_seq_cst);
    posted = true;
    op->number_ = number;
    op->posted_ = true;
    if (rides) {
      peer.sends.erase(peer.sends.begin() + static_cast<std::ptrdiff_t>(i));
      finish(op, finished);
    } else {
      ++i;
    }
  }
  if (posted) ring(rank);
  stream(rank, finished);
}

void PointToPoint::stream(int rank, Finished& finished) {
  Peer& peer = peers_[static_cast<std::size_t>(rank)];
  PairChannel& channel = *peer.out;
  for (;;) {
    if (peer.streaming == nullptr) {
      const std::uint64_t wanted = channel.granted.load(std::memory_order_acquire);
      const auto found = std::find_if(
          peer.sends.begin(), peer.sends.end(),
          [&](const PointToPointRef& op) { return op->posted_ && op->number_ + 1 == wanted; });
      if (found == peer.sends.end()) break;
      peer.streaming = *found;
      peer.sends.erase(found);
    }
    PointToPointOp& op = *peer.streaming;
    const std::size_t total = op.message.bytes();
    std::uint64_t slot = channel.streamed.load(std::memory_order_relaxed);
    while (op.moved_ < total &&
           slot - channel.drained.load(std::memory_order_acquire) < PairChannel::kDataSlots) {
      const std::size_t take = std::min(PairChannel::kDataBytes, total - op.moved_);
      op.message.read(op.moved_, take, channel.data[slot % PairChannel::kDataSlots]);
      op.moved_ += take;
      channel.streamed.store(++slot, std::memory_order_seq_cst);
      ring(rank);
    }
    if (op.moved_ < total) break;
    finish(std::exchange(peer.streaming, nullptr), finished);
  }
}

void PointToPoint::takeDescriptors(int rank, Finished& finished) {
  PairChannel& channel = *peers_[static_cast<std::size_t>(rank)].in;
  const std::uint64_t posted = channel.posted.load(std::memory_order_acquire);
  std::uint64_t number = channel.taken.load(std::memory_order_relaxed);
  if (posted == number) return;
  if (posted - number > PairChannel::kDescriptors) {
    throw Error(ErrorKind::Backend, concat(memory_.memberName(rank), " posted ", posted - number,
                                           " messages where ", PairChannel::kDescriptors, " fit"));
  }
  for (; number < posted; ++number) {
    const auto& descriptor = channel.descriptors[number % PairChannel::kDescriptors];
    Unexpected message{rank, number, descriptor.tag, descriptor.dtype, descriptor.bytes, {}};
    if (message.bytes <= PairChannel::kInlineBytes) {
      message.payload.assign(descriptor.payload, descriptor.payload + message.bytes);
    }
    const auto match =
        std::find_if(receives_.begin(), receives_.end(), [&](const PointToPointRef& op) {
          return (op->peer == rank || op->peer == kAnySource) && op->tag == message.tag;
        });
    if (match == receives_.end()) {
      unexpected_.push_back(std::move(message));
    } else {
      const PointToPointRef op = *match;
      receives_.erase(match);
      deliver(op, std::move(message), finished);
    }
  }
  channel.taken.store(number, std::memory_order_seq_cst);
  ring(rank);
}

bool PointToPoint::matchUnexpected(const PointToPointRef& op, Finished& finished) {
  const auto match =
      std::find_if(unexpected_.begin(), unexpected_.end(), [&](const Unexpected& message) {
        return (op->peer == message.source || op->peer == kAnySource) && op->tag == message.tag;
      });
  if (match == unexpected_.end()) return false;
  Unexpected message = std::move(*match);
  unexpected_.erase(match);
  try {
    deliver(op, std::move(message), finished);
  } catch (const Error& error) {
    memory_.abort(error.kind(), error.what());
    failAllLocked(finished);
  }
  return true;
}

void PointToPoint::deliver(const PointToPointRef& op, Unexpected&& message, Finished& finished) {
  op->source = message.source;
  if (message.bytes != op->message.bytes() || message.dtype != op->dtype) {
    throw Error(ErrorKind::Backend,
                concat("Detected mismatch: rank ", memory_.rank(), " runs ", describe(*op), ", ",
                       memory_.memberName(message.source), " sends ", dtypeName(message.dtype), "[",
                       message.bytes / elementSize(message.dtype), "] with tag ", message.tag,
                       ". Give both ends the same dtype and number of elements."));
  }
  if (message.bytes <= PairChannel::kInlineBytes) {
    op->message.write(0, message.bytes, message.payload.data());
    finish(op, finished);
    return;
  }
  peers_[static_cast<std::size_t>(message.source)].granted.emplace_back(message.number, op);
}

void PointToPoint::drain(int rank, Finished& finished) {
  Peer& peer = peers_[static_cast<std::size_t>(rank)];
  PairChannel& channel = *peer.in;
  while (!peer.granted.empty()) {
    const auto [number, op] = peer.granted.front();
    if (channel.granted.load(std::memory_order_relaxed) != number + 1) {
      channel.granted.store(number + 1, std::memory_order_seq_cst);
      ring(rank);
    }
    const std::size_t total = op->message.bytes();
    const std::uint64_t streamed = channel.streamed.load(std::memory_order_acquire);
    std::uint64_t slot = channel.drained.load(std::memory_order_relaxed);
    bool moved = false;
    for (; slot < streamed && op->moved_ < total; ++slot, moved = true) {
      const std::size_t take = std::min(PairChannel::kDataBytes, total - op->moved_);
      op->message.write(op->moved_, take, channel.data[slot % PairChannel::kDataSlots]);
      op->moved_ += take;
    }
    if (moved) {
      channel.drained.store(slot, std::memory_order_seq_cst);
      ring(rank);
    }
    if (op->moved_ < total) return;
    peer.granted.pop_front();
    finish(op, finished);
  }
}

}  // namespace fastcoll
