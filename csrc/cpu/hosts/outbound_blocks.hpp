// What an exchange between hosts moves. The messages of a rank for the ranks of another host are
// one outbound block. If all ranks get the same message, the block has it once. Blocks are cut into
// slices, one a chunk. Here are their lengths, and their places in segments and frames.
#pragma once

#include <algorithm>
#include <cstring>
#include <vector>

#include "cpu/hosts/multi_host.hpp"

namespace fastcoll {

class OutboundBlocks {
 public:
  OutboundBlocks(const Hosts& hosts, const Request& request)
      : hosts_(hosts),
        request_(request),
        here_(hosts.here()),
        localRank_(hosts.place()),
        ranks_(hosts.size()),
        rank_(hosts.local()[localRank_]) {}

  bool is(Collective collective) const { return request_.collective == collective; }
  /// Whether all ranks get the same message from a rank.
  bool isShared() const { return is(Collective::AllGather) || is(Collective::Barrier); }
  /// Whether a message of `bytes` goes from rank to rank, in no block. In large groups none does,
  /// because each rank would need a connection to each other rank.
  bool isLong(std::size_t bytes) const {
    return !isShared() && hosts_.size() <= kMostConnected && LongMessages::areLong(bytes);
  }
  /// Whether rank `from` has a message for rank `to` of another host.
  bool isSent(int from, int to) const {
    if (is(Collective::Gather)) return to == request_.root;
    return is(Collective::Scatter) ? from == request_.root : !is(Collective::Barrier);
  }
  /// This rank's message for a rank of another host, and from one; null if there is none.
  const Message* outgoing(int to) const {
    return isSent(rank_, to) ? &request_.in[request_.in.size() == 1 ? 0 : to] : nullptr;
  }
  const Message* incoming(int from) const {
    return isSent(from, rank_) ? &request_.out[request_.out.size() == 1 ? 0 : from] : nullptr;
  }

  // --- sizes of an all-to-all --------------------------------------------------------------------

  /// Every rank of this host sends the others the sizes that it gives and expects.
  void shareSizes(SegmentStream* stream, std::size_t segmentBytes) {
    if (!is(Collective::AllToAll)) return;
    Sizes own(2 * ranks_);
    for (std::size_t peer = 0; peer < ranks_; ++peer) {
      own[peer] = request_.in[peer].bytes();
      own[ranks_ + peer] = request_.out[peer].bytes();
    }
    sizes_.assign(hosts_.local().size(), Sizes(own.size()));
    sizes_[localRank_] = own;
    if (stream == nullptr) return;
    const std::size_t most = std::max<std::size_t>(segmentBytes / sizeof own[0], 8);
    for (std::size_t first = 0; first < own.size(); first += most) {
      const std::size_t bytes = std::min(most, own.size() - first) * sizeof own[0];
      const Segment segment = stream->reserve(bytes);
      std::memcpy(stream->acquire(segment), own.data() + first, bytes);
      stream->publish(segment);
      for (std::size_t p = 0; p < sizes_.size(); ++p) {
        if (p == localRank_) continue;
        std::memcpy(sizes_[p].data() + first, stream->await(static_cast<int>(p), segment), bytes);
      }
      stream->consume(segment);
    }
  }
  /// Bytes of sizes at the head of a frame.
  std::size_t headBytes(int from, int to) const {
    if (!is(Collective::AllToAll)) return 0;
    return 2 * sizeof(std::uint64_t) * hosts_.ranks(from).size() * hosts_.ranks(to).size();
  }
  /// Writes the sizes for a host; returns where they end.
  std::uint8_t* writeSizes(int host, std::uint8_t* at) const {
    for (std::size_t p = 0; p < sizes_.size(); ++p) {
      for (const int peer : hosts_.ranks(host)) {
        const std::uint64_t sizes[] = {given(p, peer), expected(p, peer)};
        std::memcpy(at, sizes, sizeof sizes);
        at += sizeof sizes;
      }
    }
    return at;
  }
  /// Throws unless the sizes in a host's frame are what this host expects.
  void compareSizes(const Links& links, int host) const {
    if (!is(Collective::AllToAll)) return;
    const std::size_t head = headBytes(host, here_);
    if (links.frameBytes(host) < head) (void)links.frameOf(host, head);
    const std::uint8_t* at = links.frameOf(host, links.frameBytes(host));
    for (const int peer : hosts_.ranks(host)) {
      for (std::size_t p = 0; p < sizes_.size(); ++p) {
        std::uint64_t sizes[2];  // sent to this host's rank, and expected of it
        std::memcpy(sizes, at, sizeof sizes);
        at += sizeof sizes;
        const int own = hosts_.local()[p];
        if (sizes[0] != expected(p, peer)) links.disagree(peer, own, sizes[0], expected(p, peer));
        if (sizes[1] != given(p, peer)) links.disagree(own, peer, given(p, peer), sizes[1]);
      }
    }
  }

  // --- slices; one of the hosts `from` and `to` is this one ----------------------------------

  /// Cuts blocks into slices of a length that is equal on all hosts. A rank's segment holds a slice
  /// of each of its blocks in a chunk. The leader's also holds one of each block that arrives.
  /// Together they fit `room`.
  void cut(std::size_t room) {
    const int given = isShared() || is(Collective::Gather) ? 1 : hosts_.count() - 1;
    std::size_t least = hosts_.local().size();
    for (int host = 0; host < hosts_.count(); ++host) {
      least = std::min(least, hosts_.ranks(host).size());
    }
    const int taken = is(Collective::Scatter) ? 1 : hosts_.size() - static_cast<int>(least);
    slice_ = std::max<std::size_t>(1, room / (given + taken));
  }
  /// Chunks that this host takes part in.
  std::size_t chunks() const {
    std::size_t most = 1;
    for (int host = 0; host < hosts_.count(); ++host) {
      if (host != here_) most = std::max({most, chunks(here_, host), chunks(host, here_)});
    }
    return most;
  }
  /// Whether the blocks from one host for another go with their frame.
  bool areInFrame(int from, int to) const {
    return chunks(from, to) <= 1 &&
           headBytes(from, to) + slices(from, to, 0) <= Links::kInlineBytes;
  }
  /// Bytes of the slice in chunk `c` from the rank at `sender` of host `from` to host `to`.
  std::size_t sliceBytes(int from, std::size_t sender, int to, std::size_t c) const {
    const std::size_t all = blockBytes(from, sender, to);
    return c * slice_ >= all ? 0 : std::min(slice_, all - c * slice_);
  }
  /// The sum over all ranks of host `from`.
  std::size_t slices(int from, int to, std::size_t c) const {
    std::size_t sum = 0;
    for (std::size_t p = 0; p < hosts_.ranks(from).size(); ++p) sum += sliceBytes(from, p, to, c);
    return sum;
  }

  /// Where a local rank's slice for a host begins in its segment. For host `count`, its length.
  std::size_t inOffset(std::size_t local, int to, std::size_t c) const {
    std::size_t at = 0;
    for (int host = 0; host < to; ++host) {
      if (host == here_) continue;
      const std::size_t bytes = sliceBytes(here_, local, host, c);
      if (isShared()) return to == hosts_.count() ? bytes : 0;
      at += bytes;
    }
    return at;
  }
  /// The length that the segments of all local ranks must have.
  std::size_t inBytes(std::size_t c) const {
    return most(here_, [&](std::size_t p) { return inOffset(p, hosts_.count(), c); });
  }
  /// Where the slices of a host begin in the leader's segment. For host `count`, its length.
  std::size_t outOffset(int from, std::size_t c) const {
    std::size_t at = 0;
    for (int host = 0; host < from; ++host) {
      if (host != here_) at += slices(host, here_, c);
    }
    return at;
  }

  /// Writes this rank's slice for a host; returns its bytes.
  std::size_t write(int to, std::size_t c, std::uint8_t* memory) const {
    const std::size_t length = sliceBytes(here_, localRank_, to, c);
    std::size_t at = 0;  // in the block
    for (const int peer : hosts_.ranks(to)) {
      const Message* message = outgoing(peer);
      if (length == 0 || (isShared() && at > 0)) break;
      if (message == nullptr || isLong(message->bytes())) continue;
      overlap(at, message->bytes(), c, length,
              [&](std::size_t within, std::size_t from, std::size_t bytes) {
                message->read(within, bytes, memory + from);
              });
      at += message->bytes();
    }
    return length;
  }
  /// Takes this rank's data from the slice of the rank at `sender` of another host.
  void take(int host, std::size_t sender, std::size_t c, const std::uint8_t* slice) const {
    const Message* message = incoming(hosts_.ranks(host)[sender]);
    if (message == nullptr || isLong(message->bytes())) return;
    const std::size_t at = isShared() ? 0 : carried(host, sender, here_, localRank_);
    overlap(at, message->bytes(), c, sliceBytes(host, sender, here_, c),
            [&](std::size_t within, std::size_t from, std::size_t bytes) {
              message->write(within, bytes, slice + from);
            });
  }
  /// The slice of message `index`, if all ranks get it and it is contiguous; else null.
  std::uint8_t* inPlace(const std::vector<Message>& messages, int index, std::size_t c,
                        std::size_t bytes) const {
    return isShared() ? messages[index].contiguous(c * slice_, bytes) : nullptr;
  }

 private:
  static constexpr int kMostConnected = 128;
  using Sizes = std::vector<std::uint64_t>;

  /// Bytes of the message from the rank at `sender` of host `from` to the rank at `receiver` of
  /// host `to`.
  std::size_t messageBytes(int from, std::size_t sender, int to, std::size_t receiver) const {
    const int source = hosts_.ranks(from)[sender], target = hosts_.ranks(to)[receiver];
    if (!isSent(source, target)) return 0;
    if (is(Collective::AllToAll)) {
      return from == here_ ? given(sender, target) : expected(receiver, source);
    }
    if (is(Collective::Gather)) return request_.in[0].bytes();
    return request_.out[is(Collective::AllGather) ? source : 0].bytes();
  }
  /// All-to-all: bytes that the rank at `local` of this host gives to rank `to` of another host,
  /// and expects from rank `from` there.
  std::uint64_t given(std::size_t local, int to) const { return sizes_[local][to]; }
  std::uint64_t expected(std::size_t local, int from) const { return sizes_[local][ranks_ + from]; }

  std::size_t blockBytes(int from, std::size_t sender, int to) const {
    if (isShared()) return messageBytes(from, sender, to, 0);
    return carried(from, sender, to, hosts_.ranks(to).size());
  }
  /// Bytes in the block for the first `receivers` ranks of host `to`.
  std::size_t carried(int from, std::size_t sender, int to, std::size_t receivers) const {
    std::size_t first = 0;
    if (is(Collective::Scatter)) {  // all receivers get as much
      const std::size_t each = messageBytes(from, sender, to, 0);
      return isLong(each) ? 0 : receivers * each;
    }
    if (is(Collective::Gather)) {  // only the root gets a message
      if (hosts_.hostOf(request_.root) != to) return 0;
      const auto& ranks = hosts_.ranks(to);
      first = std::ranges::lower_bound(ranks, request_.root) - ranks.begin();
      receivers = std::min(receivers, first + 1);
    }
    std::size_t sum = 0;
    for (std::size_t p = first; p < receivers; ++p) {
      const std::size_t bytes = messageBytes(from, sender, to, p);
      if (!isLong(bytes)) sum += bytes;
    }
    return sum;
  }
  /// The largest of of(p), for the ranks at the places p of a host.
  template <typename Of>
  std::size_t most(int host, Of of) const {
    std::size_t largest = 0;
    for (std::size_t p = 0; p < hosts_.ranks(host).size(); ++p) largest = std::max(largest, of(p));
    return largest;
  }
  std::size_t chunks(int from, int to) const {
    return ceilDiv(most(from, [&](std::size_t p) { return blockBytes(from, p, to); }), slice_);
  }
  /// Calls use(offset in the message, offset in the slice, bytes) for what the slice of `length` in
  /// chunk `c` has of a message of `bytes` that begins at `at` of the block.
  template <typename Use>
  void overlap(std::size_t at, std::size_t bytes, std::size_t c, std::size_t length,
               Use use) const {
    const std::size_t start = c * slice_;
    const std::size_t from = std::max(at, start), to = std::min(at + bytes, start + length);
    if (from < to) use(from - at, from - start, to - from);
  }

  const Hosts& hosts_;
  const Request& request_;
  const int here_;
  const std::size_t localRank_;
  const std::size_t ranks_;
  const int rank_;
  std::vector<Sizes> sizes_;  // all-to-all, of each rank here: bytes it gives and expects
  std::size_t slice_ = 1;     // most bytes of a block in a chunk
};

}  // namespace fastcoll
