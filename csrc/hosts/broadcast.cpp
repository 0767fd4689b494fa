// Broadcast over several hosts.
//
// B bytes go over H hosts by one of three algorithms; selector.hpp chooses. On the root's host all
// ranks read what the root publishes, elsewhere what the leader does.
//   flat: a short message goes from the root's host to all others in frames.
//       Steps between hosts: 1. Bytes that a host sends: (H - 1) B.
//   scatter and all-gather: each other host gets a part that fits a frame, and forwards it to the
//       other hosts, except the root's. Steps: 2. Bytes: B.
//   chain: a longer message goes from host to host, chunk by chunk, beginning with the root's host.
//       Each forwards a chunk as soon as it has it. Steps: H - 1, and 1 a chunk. Bytes: B.
#include <algorithm>
#include <deque>

#include "selector.hpp"
#include "spanning.hpp"

namespace fastcoll {
namespace {

constexpr std::size_t kChunks = 8;
constexpr std::size_t kLeastChunk = 512 * 1024;
// Chunks that a leader sends, or awaits, at once.
constexpr std::size_t kAhead = 3;

class SpanningBroadcast {
 public:
  SpanningBroadcast(Spanning& spanning, const Request& request)
      : spanning_(spanning),
        hosts_(spanning.hosts),
        stream_(spanning.stream),
        links_(spanning.links.get()),
        rank_(hosts_.local()[hosts_.place()]),
        root_(rank_ == request.root),
        rootHost_(hosts_.hostOf(request.root)),
        request_(request),
        message_(root_ ? request.in[0] : request.out[0]),
        bytes_(message_.bytes()),
        algorithm_(selectHostBroadcast(hosts_.count(), bytes_, spanning.tuning.linkBytes)),
        chunk_(std::max<std::size_t>(
            1, std::min({spanning.segmentBytes(), std::max(kLeastChunk, bytes_ / kChunks)}))),
        chunks_(std::max<std::size_t>(1, ceilDiv(bytes_, chunk_))) {
    const auto& local = hosts_.local();
    const auto place = std::find(local.begin(), local.end(), request.root);
    publisher_ = place == local.end() ? 0 : static_cast<int>(place - local.begin());
    if (hosts_.leads()) spanning.scratch.resize(std::max(spanning.scratch.size(), kAhead));
  }

  void run() {
    if (stream_ != nullptr) {
      stream_->begin(request_.arrival(), {}, nullptr, request_.deadline, request_.timeout);
    }
    if (!hosts_.leads()) {
      for (std::size_t c = 0; c < chunks_; ++c) follow(c);
    } else if (algorithm_ != HostBroadcast::Chain) {
      inFrames();
    } else {
      along();
    }
    if (stream_ != nullptr) stream_->end();
  }

 private:
  bool publishes() const { return publisher_ == hosts_.place(); }
  std::size_t length(std::size_t c) const { return std::min(chunk_, bytes_ - c * chunk_); }

  /// What a rank other than the leader does.
  void follow(std::size_t c) {
    const Segment segment = stream_->place(length(c));
    if (publishes()) {
      fill(c, segment);
    } else {
      if (c == 0) stream_->publish(segment);  // announces only its arrival
      message_.write(c * chunk_, length(c), stream_->await(publisher_, segment));
    }
    consume(c, segment);
  }
  /// As in a broadcast on one host, every rank waits until all of its host have arrived. Only then
  /// it consumes the last segment, because a peer may free its memory after that.
  void consume(std::size_t c, const Segment& segment) {
    if (c + 1 == chunks_) stream_->awaitArrivals();
    stream_->consume(segment);
  }

  std::uint8_t* fill(std::size_t c, const Segment& segment) {
    std::uint8_t* memory = stream_->fill(segment, [&](std::uint8_t* to, bool streaming) {
      message_.read(c * chunk_, length(c), to, streaming);
      return length(c);
    });
    stream_->publish(segment);
    return memory;
  }

  /// The chunk in memory that the leader of the root's host can read. Other hosts have it in place.
  const std::uint8_t* fetch(std::size_t c, const Segment& segment) {
    if (root_) {
      if (stream_ != nullptr) return fill(c, segment);
      if (const auto* direct = message_.contiguous(c * chunk_, length(c))) return direct;
      std::uint8_t* copy = spanning_.scratch[c % kAhead].get(length(c));
      message_.read(c * chunk_, length(c), copy);
      return copy;
    }
    if (c == 0) stream_->publish(segment);  // announces only its arrival
    const std::uint8_t* memory = stream_->await(publisher_, segment);
    message_.write(c * chunk_, length(c), memory);
    return memory;
  }

  /// The part of the message that a host other than the root's gets in a frame.
  Piece partOf(int host) const {
    if (algorithm_ == HostBroadcast::Flat) return {0, bytes_};
    return pieceOf(bytes_, hosts_.count() - 1, host - (host > rootHost_ ? 1 : 0));
  }

  void inFrames() {
    const bool sends = hosts_.here() == rootHost_;
    if (!sends) passOn();
    for (std::size_t c = 0; c < chunks_; ++c) {
      Segment segment;
      if (stream_ != nullptr) segment = stream_->place(length(c));
      if (sends) {
        const std::uint8_t* from = fetch(c, segment);
        for (const int host : links_->others()) {
          std::uint8_t* const frame = links_->frame(host);
          const Piece part = partOf(host);
          const std::size_t start = std::max(part.start, c * chunk_);
          const std::size_t end = std::min(part.start + part.count, c * chunk_ + length(c));
          if (start >= end) continue;
          std::copy(from + start - c * chunk_, from + end - c * chunk_, frame + start - part.start);
        }
      } else if (stream_ != nullptr) {
        fill(c, segment);
      }
      if (stream_ != nullptr) consume(c, segment);
    }
    if (!sends) return;
    links_->sendFrames(links_->others(), Links::Flow::Out,
                       [&](int host) { return partOf(host).count; });
  }
  /// Receives this host's part. Forwards it to the hosts other than the root's, which do the same.
  void passOn() {
    const Piece own = partOf(hosts_.here());
    const auto nothing = [](int) { return std::size_t{0}; };
    links_->sendFrames({rootHost_}, Links::Flow::In, nothing);
    links_->awaitFrames({rootHost_}, Links::Flow::In);
    const std::uint8_t* data = links_->frameOf(rootHost_, own.count);
    std::vector<int> peers;
    for (const int host : links_->others()) {
      if (host != rootHost_ && algorithm_ == HostBroadcast::ScatterAllGather) peers.push_back(host);
    }
    links_->sendFrames(peers, Links::Flow::Both, [&](int host) {
      std::copy(data, data + own.count, links_->frame(host));
      return own.count;
    });
    message_.write(own.start, own.count, data);
    links_->awaitFrames(peers, Links::Flow::Both);
    for (const int host : peers) {
      const Piece part = partOf(host);
      message_.write(part.start, part.count, links_->frameOf(host, part.count));
    }
  }

  /// The chain, from host to host.
  void along() {
    struct Chunk {
      Segment segment;
      std::uint8_t* memory = nullptr;
      TransferRef receive, send;
    };
    const int count = hosts_.count();
    const int step = (hosts_.here() - rootHost_ + count) % count;
    const bool receives = step > 0, sends = step + 1 < count;
    const int before = (hosts_.here() + count - 1) % count, next = (hosts_.here() + 1) % count;
    std::deque<Chunk> under;            // in flight: placed, not yet consumed
    std::size_t placed = 0, begin = 0;  // `begin`: the chunk at the front of `under`
    const auto place = [&] {
      const std::size_t c = placed++;
      Chunk chunk;
      if (stream_ != nullptr) chunk.segment = stream_->place(length(c));
      if (receives) {
        std::uint8_t* direct = stream_ != nullptr ? stream_->acquire(chunk.segment)
                                                  : message_.contiguous(c * chunk_, length(c));
        chunk.memory = direct != nullptr ? direct : spanning_.scratch[c % kAhead].get(length(c));
        chunk.receive = links_->receive(before, chunk.memory, length(c));
      }
      under.push_back(std::move(chunk));
    };
    const auto retire = [&] {
      Chunk& oldest = under.front();
      links_->wait(next, oldest.send);
      if (stream_ != nullptr) consume(begin, oldest.segment);
      under.pop_front();
      ++begin;
    };
    if (receives) {
      while (placed < std::min(chunks_, kAhead)) place();
    }
    const auto nothing = [](int) { return std::size_t{0}; };
    if (receives) links_->sendFrames({before}, Links::Flow::In, nothing);
    if (sends) links_->sendFrames({next}, Links::Flow::Out, nothing);
    if (receives) links_->awaitFrames({before}, Links::Flow::In);
    for (std::size_t c = 0; c < chunks_; ++c) {
      if (c == placed) {
        if (under.size() == kAhead) retire();
        place();
      }
      Chunk& chunk = under[c - begin];
      const std::uint8_t* memory = chunk.memory;
      if (receives) {
        links_->wait(before, chunk.receive);
        if (stream_ != nullptr) stream_->publish(chunk.segment);
        message_.write(c * chunk_, length(c), memory);
      } else {
        memory = fetch(c, chunk.segment);
      }
      if (sends) chunk.send = links_->send(next, memory, length(c));
      if (receives && placed < chunks_ && under.size() == kAhead) {
        retire();
        place();
      }
    }
    while (!under.empty()) retire();
  }

  Spanning& spanning_;
  const Hosts& hosts_;
  SegmentStream* const stream_;
  Links* const links_;
  const int rank_;
  const bool root_;
  const int rootHost_;
  const Request& request_;
  const Message& message_;
  const std::size_t bytes_;
  const HostBroadcast algorithm_;
  const std::size_t chunk_;
  const std::size_t chunks_;
  int publisher_ = 0;  // the place of the publishing rank on this host
};

}  // namespace

void spanningBroadcast(Spanning& spanning, const Request& request) {
  SpanningBroadcast(spanning, request).run();
}

}  // namespace fastcoll
