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

#include "cpu/algorithms/pipeline.hpp"
#include "cpu/hosts/pipeline.hpp"
#include "cpu/hosts/selector.hpp"

namespace fastcoll {
namespace {

std::size_t nothing(int) {
  return 0;
}

class HierarchicalBroadcast : HostPipeline {
 public:
  HierarchicalBroadcast(MultiHost& multiHost, const Request& request)
      : HostPipeline(multiHost, request),
        root_(hosts_.local()[localRank_] == request.root),
        rootHost_(hosts_.hostOf(request.root)),
        message_(root_ ? request.in[0] : request.out[0]),
        bytes_(message_.bytes()),
        algorithm_(selectHostBroadcast(hosts_.count(), bytes_, multiHost.tuning.linkBytes)),
        cut_(bytes_, std::min(multiHost.segmentBytes(), std::max(kLeastChunk, bytes_ / kChunks))) {
    const auto& local = hosts_.local();
    const auto root = std::ranges::find(local, request.root);
    publisher_ = root == local.end() ? 0 : static_cast<int>(root - local.begin());
    useSlots(kAhead, 1);
  }

  void run() {
    begin();
    const bool framed = leads() && !isLink();
    if (framed && !atRoot()) receiveFrames();
    runChunks(
        cut_.segments, isLink() && !atRoot() ? kAhead - 1 : 0, [this](std::size_t c) { start(c); },
        [this](std::size_t c) { finish(c); });
    if (framed && atRoot()) {
      links_->sendFrames(links_->others(), Links::Flow::Out,
                         [this](int host) { return partOf(host).count; });
    }
    if (isLink()) release(cut_.segments - 1);
    end();
  }

 private:
  static constexpr std::size_t kChunks = 8;
  static constexpr std::size_t kLeastChunk = 512 * 1024;
  // Chunks that a leader sends, or awaits, at once.
  static constexpr std::size_t kAhead = 3;

  bool atRoot() const { return here_ == rootHost_; }
  /// Whether this rank is the leader of a host in the chain.
  bool isLink() const { return leads() && algorithm_ == HostBroadcast::Chain; }

  void start(std::size_t c) {
    if (isLink() && c >= kAhead) release(c - kAhead);  // its sends have ended
    slot(c).out = place(cut_.length(c));
    if (isLink() && !atRoot()) receive(c, previous(), arriving(c), cut_.length(c));
  }
  void finish(std::size_t c) {
    if (isLink()) return forward(c);
    if (stream_ != nullptr || atRoot()) {
      const std::uint8_t* memory = fetch(c);
      if (leads() && atRoot()) copyToFrames(c, memory);
    }
    release(c);
  }
  /// As in a broadcast on one host, every rank waits until all of its host have arrived. Only then
  /// it consumes the last segment, because a peer may free its memory after that.
  void release(std::size_t c) {
    if (stream_ != nullptr && c + 1 == cut_.segments) stream_->awaitArrivals();
    consume(slot(c).out);
  }

  /// Publishes this rank's chunk, or takes it from the rank that does. Returns memory with the
  /// chunk that stays as it is until this rank releases it.
  const std::uint8_t* fetch(std::size_t c) {
    const Segment& segment = slot(c).out;
    if (stream_ == nullptr) {
      if (const auto* direct = message_.contiguous(cut_.offset(c), cut_.length(c))) return direct;
      std::uint8_t* copy = scratch(c, 0, cut_.length(c));
      message_.read(cut_.offset(c), cut_.length(c), copy);
      return copy;
    }
    if (publisher_ == static_cast<int>(localRank_)) {
      std::uint8_t* memory = stream_->fill(segment, [&](std::uint8_t* to, bool streaming) {
        message_.read(cut_.offset(c), cut_.length(c), to, streaming);
        return cut_.length(c);
      });
      publish(segment);
      return memory;
    }
    if (c == 0) publish(segment);  // announces only its arrival
    const std::uint8_t* memory = stream_->await(publisher_, segment);
    message_.write(cut_.offset(c), cut_.length(c), memory);
    return memory;
  }

  // --- the chain, from host to host --------------------------------------------------------------

  int previous() const { return (here_ + hosts_.count() - 1) % hosts_.count(); }
  int next() const { return (here_ + 1) % hosts_.count(); }
  std::uint8_t* arriving(std::size_t c) {
    std::uint8_t* direct = stream_ != nullptr ? stream_->acquire(slot(c).out)
                                              : message_.contiguous(cut_.offset(c), cut_.length(c));
    return direct != nullptr ? direct : scratch(c, 0, cut_.length(c));
  }
  void forward(std::size_t c) {
    const bool sends = next() != rootHost_;
    if (c == 0) {
      if (!atRoot()) links_->sendFrames({previous()}, Links::Flow::In, nothing);
      if (sends) links_->sendFrames({next()}, Links::Flow::Out, nothing);
      if (!atRoot()) links_->awaitFrames({previous()}, Links::Flow::In);
    }
    const std::uint8_t* memory = nullptr;
    if (atRoot()) {
      memory = fetch(c);
    } else {
      awaitReceives(c);
      memory = arriving(c);
      publish(slot(c).out);
      message_.write(cut_.offset(c), cut_.length(c), memory);
    }
    if (sends) send(c, next(), memory, cut_.length(c));
  }

  // --- frames ------------------------------------------------------------------------------------

  /// The part of the message that a host other than the root's gets in a frame.
  Piece partOf(int host) const {
    if (algorithm_ == HostBroadcast::Flat) return {0, bytes_};
    return pieceOf(bytes_, hosts_.count() - 1, host - (host > rootHost_ ? 1 : 0));
  }
  void copyToFrames(std::size_t c, const std::uint8_t* from) {
    for (const int host : links_->others()) {
      std::uint8_t* const frame = links_->frame(host);
      const Piece part = partOf(host);
      const std::size_t start = std::max(part.start, cut_.offset(c));
      const std::size_t end = std::min(part.start + part.count, cut_.offset(c) + cut_.length(c));
      if (start >= end) continue;
      std::copy(from + start - cut_.offset(c), from + end - cut_.offset(c),
                frame + start - part.start);
    }
  }
  /// Receives this host's part. Forwards it to the hosts other than the root's, which do the same.
  void receiveFrames() {
    const Piece own = partOf(here_);
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

  const bool root_;
  const int rootHost_;
  const Message& message_;
  const std::size_t bytes_;
  const HostBroadcast algorithm_;
  const Cut cut_;      // into chunks
  int publisher_ = 0;  // the local rank that publishes on this host
};

}  // namespace

void hierarchicalBroadcast(MultiHost& multiHost, const Request& request) {
  HierarchicalBroadcast(multiHost, request).run();
}

}  // namespace fastcoll
