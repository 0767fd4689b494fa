// All-gather, gather, scatter, all-to-all and barrier over several hosts.
//
// Phases: the ranks of a host exchange data as on one host. A long message for one rank of another
//         host goes there directly (long_messages.hpp). The rest are blocks (outbound_blocks.hpp).
//         In each chunk the leader collects a slice of every block of its host, exchanges slices
//         with the other leaders, and publishes those that have arrived. Each rank takes its own
//         data from them. A barrier is an exchange of nothing.
// Steps between hosts: 1 if the blocks fit frames, else 1 and 1 a chunk.
// Bytes that a host sends: what the ranks of other hosts get from its ranks, once for each host:
//         all-gather of B in all (H - 1) / H B.
#include <algorithm>
#include <cstring>

#include "cpu/hosts/outbound_blocks.hpp"
#include "cpu/hosts/pipeline.hpp"

namespace fastcoll {
namespace {

class HierarchicalExchange : HostPipeline {
 public:
  HierarchicalExchange(MultiHost& multiHost, const Request& request)
      : HostPipeline(multiHost, request),
        rootHost_(request.root >= 0 ? hosts_.hostOf(request.root) : -1),
        blocks_(hosts_, request),
        long_(multiHost, request) {
    useSlots(2, 2 * hosts_.count());
  }

  void run() {
    addLong();
    long_.begin();
    exchangeInHost();
    begin();
    blocks_.shareSizes(stream_, multiHost_.segmentBytes());
    blocks_.cut(hosts_.most() > 1 ? multiHost_.segmentBytes() : kLongestChunk);
    runChunks(
        blocks_.chunks(), 1, [this](std::size_t c) { start(c); },
        [this](std::size_t c) { finish(c); });
    long_.finish();
    end();
  }

 private:
  // Bytes of a chunk if no host has a segment to go through.
  static constexpr std::size_t kLongestChunk = std::size_t{4} << 20;

  /// Adds the messages of this rank that are in no block.
  void addLong() {
    for (int step = 1; step < hosts_.count() && !blocks_.isShared(); ++step) {
      for (const int peer : hosts_.ranks((here_ + step) % hosts_.count())) {
        const Message *in = blocks_.incoming(peer), *out = blocks_.outgoing(peer);
        if (in != nullptr && blocks_.isLong(in->bytes())) long_.receive(peer, *in);
        if (out != nullptr && blocks_.isLong(out->bytes())) long_.send(peer, *out);
      }
    }
  }

  /// The part of the collective among the ranks of this host.
  void exchangeInHost() {
    if (blocks_.is(Collective::Barrier) || (rootHost_ >= 0 && rootHost_ != here_)) return;
    const auto& local = hosts_.local();
    Request part = request_;
    part.contiguousParts = false;
    part.expectedCount = localCounts();
    const auto subset = [&](std::vector<Message>& messages) {
      if (messages.size() != static_cast<std::size_t>(hosts_.size())) return;
      std::vector<Message> chosen;
      for (const int rank : local) chosen.push_back(messages[rank]);
      messages = std::move(chosen);
    };
    if (!blocks_.is(Collective::AllGather)) subset(part.in);
    if (!blocks_.is(Collective::Scatter)) subset(part.out);
    if (rootHost_ >= 0) {
      part.root = static_cast<int>(std::ranges::find(local, request_.root) - local.begin());
    }
    if (stream_ != nullptr) {
      runCollective(*stream_, part, multiHost_.tuning);
    } else {
      part.in[0].copyTo(part.out[0]);
    }
  }

  void start(std::size_t c) {
    Slot& now = slot(c);
    now.in = place(blocks_.inBytes(c));
    now.out = place(blocks_.outOffset(hosts_.count(), c));
    if (!leads()) {
      std::uint8_t* memory = stream_->acquire(now.in);
      std::size_t written = 0;
      for (int host = 0; host < hosts_.count(); ++host) {
        if (host == here_ || (blocks_.isShared() && written > 0)) continue;
        written += blocks_.write(host, c, memory + written);
      }
      return publish(now.in);
    }
    if (c == 0) publish(now.in);  // announces only its arrival
    postReceives(c);
    if (c == 0) sendFrames();
    for (const int host : links_->others()) {
      const std::size_t size = blocks_.slices(here_, host, c);
      if (size == 0 || blocks_.areInFrame(here_, host)) continue;
      const std::uint8_t* from =
          stream_ == nullptr ? blocks_.inPlace(request_.in, 0, c, size) : nullptr;
      if (from == nullptr) {
        std::uint8_t* const memory = scratch(c, 2 * host, size);
        gather(host, c, memory);
        from = memory;
      }
      send(c, host, from, size);
    }
    consume(now.in);
  }
  void postReceives(std::size_t c) {
    std::uint8_t* segment = stream_ != nullptr ? stream_->acquire(slot(c).out) : nullptr;
    for (const int host : links_->others()) {
      const std::size_t size = blocks_.slices(host, here_, c);
      if (size == 0 || blocks_.areInFrame(host, here_)) continue;
      std::uint8_t* memory =
          segment != nullptr ? segment + blocks_.outOffset(host, c) : arriving(host, c, size);
      receive(c, host, memory, size);
    }
  }
  /// Where the slices of another host arrive, for a rank that is alone on its host.
  std::uint8_t* arriving(int host, std::size_t c, std::size_t size) {
    const auto& ranks = hosts_.ranks(host);
    std::uint8_t* into =
        ranks.size() == 1 ? blocks_.inPlace(request_.out, ranks[0], c, size) : nullptr;
    return into != nullptr ? into : scratch(c, 2 * host + 1, size);
  }
  /// Concatenates the slices of this host's ranks for another host.
  void gather(int host, std::size_t c, std::uint8_t* to) {
    for (std::size_t p = 0; p < hosts_.local().size(); ++p) {
      const std::size_t length = blocks_.sliceBytes(here_, p, host, c);
      if (p == localRank_) {
        blocks_.write(host, c, to);
      } else {
        const std::uint8_t* from = stream_->await(static_cast<int>(p), slot(c).in);
        std::memcpy(to, from + blocks_.inOffset(p, host, c), length);
      }
      to += length;
    }
  }

  void sendFrames() {
    if (stream_ != nullptr) stream_->awaitArrivals();
    peers_ = links_->others();
    if (rootHost_ >= 0) {
      peers_ = links_->around(rootHost_);
      const bool scatters = blocks_.is(Collective::Scatter);
      // Ranks with long messages wait for the other host anyway. Its header message shows that it
      // runs this collective.
      if (scatters != (rootHost_ == here_)) {
        flow_ = Links::Flow::In;
      } else if (!blocks_.isLong((scatters ? request_.out : request_.in)[0].bytes())) {
        flow_ = Links::Flow::Out;
      }
    }
    links_->sendFrames(peers_, flow_, [this](int host) {
      std::uint8_t* const frame = links_->frame(host);
      std::uint8_t* const at = blocks_.writeSizes(host, frame);
      if (!blocks_.areInFrame(here_, host)) return static_cast<std::size_t>(at - frame);
      gather(host, 0, at);
      return at - frame + blocks_.slices(here_, host, 0);
    });
  }
  void awaitFrames() {
    links_->awaitFrames(peers_, flow_);
    for (const int host : peers_) {
      if (flow_ == Links::Flow::Out) break;
      blocks_.compareSizes(*links_, host);
      (void)frameData(host);
    }
  }
  /// The slices in a host's frame.
  const std::uint8_t* frameData(int host) const {
    const std::size_t head = blocks_.headBytes(host, here_);
    const bool has = blocks_.areInFrame(host, here_);
    return links_->frameOf(host, head + (has ? blocks_.slices(host, here_, 0) : 0)) + head;
  }

  void finish(std::size_t c) {
    Slot& now = slot(c);
    const std::uint8_t* segment = leads() ? collect(c) : stream_->await(0, now.out);
    for (int host = 0; host < hosts_.count(); ++host) {
      const std::size_t size = host == here_ ? 0 : blocks_.slices(host, here_, c);
      if (size == 0) continue;
      const std::uint8_t* from = segment != nullptr ? segment + blocks_.outOffset(host, c)
                                 : blocks_.areInFrame(host, here_) ? frameData(host)
                                                                   : arriving(host, c, size);
      for (std::size_t p = 0; p < hosts_.ranks(host).size(); ++p) {
        blocks_.take(host, p, c, from);
        from += blocks_.sliceBytes(host, p, here_, c);
      }
    }
    consume(now.out);
  }
  /// Waits until the slices of other hosts have arrived, and publishes them. Returns the segment,
  /// or null.
  const std::uint8_t* collect(std::size_t c) {
    if (c == 0) awaitFrames();
    awaitReceives(c);
    if (stream_ == nullptr) return nullptr;
    std::uint8_t* const segment = stream_->acquire(slot(c).out);
    for (const int host : links_->others()) {
      const std::size_t size = blocks_.slices(host, here_, c);
      if (size == 0 || !blocks_.areInFrame(host, here_)) continue;
      std::memcpy(segment + blocks_.outOffset(host, c), frameData(host), size);
    }
    publish(slot(c).out);
    return segment;
  }

  const int rootHost_;  // or -1
  OutboundBlocks blocks_;
  LongMessages long_;
  std::vector<int> peers_;  // hosts that this one exchanges frames with
  Links::Flow flow_ = Links::Flow::Both;
};

}  // namespace

void hierarchicalExchange(MultiHost& multiHost, const Request& request) {
  HierarchicalExchange(multiHost, request).run();
}

}  // namespace fastcoll
