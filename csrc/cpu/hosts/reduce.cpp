// All-reduce, reduce and reduce-scatter over several hosts.
//
// Phases, for each chunk of the message: the leader sums its host's operands, one subtree after
//         another (partial_sum.hpp). The leaders exchange partial results. A leader with those of
//         all hosts sums them. If a chunk was split among the hosts, all of them (all-reduce), or
//         the root's host (reduce), gather its parts. The leader publishes the result.
//         Chunks are in different phases at the same time, so the network is busy in all of them.
// Steps between hosts: 1 if each sends all its partial results to all others, else 2; see
//         selector.hpp. Two hosts take 1 unless partial results are long, and longer than the
//         result.
// Bytes that a host sends, for H hosts and a message of B: (H - 1) P in one step; in two steps
//         (H - 1) / H (P + B); reduce-scatter (H - 1) / H P. P, the host's partial results, is B
//         times its number of subtrees. That is 1 if its ranks are an aligned run. Partial results
//         of 16-bit tensors are float32 if a subtree has several ranks.
#include <algorithm>
#include <cstring>

#include "cpu/algorithms/pipeline.hpp"
#include "cpu/hosts/pipeline.hpp"
#include "cpu/hosts/selector.hpp"

namespace fastcoll {
namespace {

class HierarchicalReduce : HostPipeline {
 public:
  HierarchicalReduce(MultiHost& multiHost, const Request& request)
      : HostPipeline(multiHost, request),
        sum_(request, hosts_, multiHost.sums),
        element_(elementSize(request.dtype)),
        scatters_(request.collective == Collective::ReduceScatter),
        rootHost_(request.collective == Collective::Reduce ? hosts_.hostOf(request.root) : -1),
        messages_(scatters_ ? hosts_.size() : 1),
        total_(request.in[0].bytes() / element_),
        oneStep_(scatters_ || takesOneStep()),
        cut_(total_, chunk()),
        inFrames_(fitsFrames()) {
    useSlots(lag() + 1, 2 * hosts_.count() + 1);
  }

  void run() {
    begin();
    runChunks(
        cut_.segments, lag(), [this](std::size_t c) { start(c); },
        [this](std::size_t c) { combine(c); }, [this](std::size_t c) { finish(c); });
    end();
    addSquares();
  }

 private:
  // A message is cut into at least kChunks chunks, to be in several phases at once. But no chunk
  // has less than kLeastPiece for a host.
  static constexpr std::size_t kChunks = 8;
  static constexpr std::size_t kLeastPiece = 256 * 1024;
  // Longest chunk if no host has a segment to go through.
  static constexpr std::size_t kLongestChunk = std::size_t{2} << 20;

  std::size_t lag() const { return oneStep_ ? 1 : 2; }
  bool takesOneStep() const {
    const std::size_t bytes = request_.in[0].bytes();
    std::size_t most = 0;
    for (int host = 0; host < hosts_.count(); ++host) {
      most = std::max(most, sum_.subtrees(host) * sum_.partialBytes(host, bytes));
    }
    return reducesInOneStep(hosts_.count(), most, sum_.resultBytes(bytes),
                            multiHost_.tuning.linkBytes);
  }
  std::size_t chunk() const {
    const std::size_t longest = hosts_.most() > 1 ? multiHost_.segmentBytes() : kLongestChunk;
    const std::size_t most = longest / messages_;
    const std::size_t hosts = oneStep_ ? 1 : hosts_.count();
    const std::size_t wanted = std::max(kLeastPiece * hosts, total_ * element_ / kChunks);
    const std::size_t elements = std::max<std::size_t>(1, std::min(most, wanted) / element_);
    return elements > 64 ? elements / 64 * 64 : elements;
  }
  /// Whether the whole exchange of one step, between all hosts, fits frames.
  bool fitsFrames() const {
    if (!oneStep_ || cut_.segments > 1) return false;
    for (int from = 0; from < hosts_.count(); ++from) {
      for (int to = 0; to < hosts_.count(); ++to) {
        if (from != to && sentBytes(0, from, to) > Links::kInlineBytes) return false;
      }
    }
    return true;
  }

  std::size_t elements(std::size_t c) const { return cut_.length(c); }
  std::size_t bytes(std::size_t c) const { return elements(c) * element_; }
  std::size_t offset(std::size_t c) const { return cut_.offset(c) * element_; }
  /// The part of a chunk that a host sums up over all hosts.
  Piece piece(std::size_t c, int host) const {
    if (oneStep_) return {0, elements(c)};
    return pieceOf(elements(c), hosts_.count(), host);
  }
  /// The number of such parts, each of its own message, that a host sums.
  std::size_t targets(int host) const {
    if (scatters_) return hosts_.ranks(host).size();
    return rootHost_ >= 0 && oneStep_ && host != rootHost_ ? 0 : 1;
  }
  int message(int host, std::size_t target) const {
    return scatters_ ? hosts_.ranks(host)[target] : 0;
  }
  std::size_t partialBytes(std::size_t c, int from, int to) const {
    return sum_.partialBytes(from, piece(c, to).count * element_);
  }
  std::size_t sentBytes(std::size_t c, int from, int to) const {
    return targets(to) * sum_.subtrees(from) * partialBytes(c, from, to);
  }

  // --- scratch buffers of a slot: what goes to each host, what comes from it, and the result -----

  /// The operand, if it is this one-rank host's partial result and contiguous; else null.
  const std::uint8_t* operand(std::size_t c, int host) const {
    const bool alone = sum_.plain(here_) && sum_.subtrees(here_) == 1;
    if (!alone || targets(host) > 1) return nullptr;
    const Piece part = piece(c, host);
    return request_.in[message(host, 0)].contiguous(offset(c) + part.start * element_,
                                                    part.count * element_);
  }
  /// This host's partial results for another.
  const std::uint8_t* partial(std::size_t c, int host) {
    const std::uint8_t* own = operand(c, host);
    return own != nullptr ? own : outgoing(c, host);
  }
  std::uint8_t* outgoing(std::size_t c, int host) {
    // In one step all hosts get the same, except in a reduce-scatter.
    const int shared = scatters_ || !oneStep_ ? host : here_;
    const std::size_t size = std::max<std::size_t>(targets(shared), 1) * sum_.subtrees(here_) *
                             partialBytes(c, here_, shared);
    return scratch(c, shared, size);
  }
  std::uint8_t* incoming(std::size_t c, int host) {
    return scratch(c, hosts_.count() + host, sentBytes(c, host, here_));
  }
  /// The result's place in the output, if no other rank of this host needs it and it is contiguous;
  /// else null. The order is safe with two steps: another host sends its part of the result only
  /// after it has received this host's operand of that part.
  std::uint8_t* resultInPlace(std::size_t c) const {
    if (stream_ != nullptr || !isRoot()) return nullptr;
    return request_.out[0].contiguous(sum_.resultBytes(offset(c)), sum_.resultBytes(bytes(c)));
  }
  std::uint8_t* result(std::size_t c) {
    if (std::uint8_t* out = resultInPlace(c)) return out;
    const std::size_t parts = scatters_ ? hosts_.local().size() : 1;
    return scratch(c, 2 * hosts_.count(), parts * sum_.resultBytes(bytes(c)));
  }

  /// Posts the receives of a chunk.
  void postReceives(std::size_t c) {
    if (inFrames_) return;
    for (const int host : links_->others()) {
      receive(c, host, incoming(c, host), sentBytes(c, host, here_));
    }
    if (oneStep_ || !wantsResult(here_)) return;
    for (const int host : links_->others()) {
      const Piece part = piece(c, host);
      receive(c, host, result(c) + sum_.resultBytes(part.start * element_),
              sum_.resultBytes(part.count * element_), Links::kSecondStep);
    }
  }
  bool isRoot() const { return rootHost_ < 0 || request_.root == hosts_.local()[localRank_]; }
  bool wantsResult(int host) const { return rootHost_ < 0 || host == rootHost_; }

  /// Sends the operands of a chunk to the leader, and the leader's partial results to other hosts.
  void start(std::size_t c) {
    const std::size_t size = bytes(c);
    const Segment segment = place(size * messages_);
    if (!leads()) {
      stream_->fill(segment, [&](std::uint8_t* memory, bool streaming) {
        for (std::size_t m = 0; m < static_cast<std::size_t>(messages_); ++m) {
          request_.in[m].read(offset(c), size, memory + m * size, streaming);
        }
        return size * messages_;
      });
      publish(segment);
      return consume(segment);
    }
    if (c == 0) publish(segment);  // announces only its arrival
    postReceives(c);
    if (c == 0 && !inFrames_) sendFrames([](int) { return std::size_t{0}; });
    std::vector<const std::uint8_t*> segments(hosts_.local().size(), nullptr);
    for (std::size_t local = 1; local < segments.size(); ++local) {
      segments[local] = stream_->await(static_cast<int>(local), segment);
    }
    if (oneStep_ && !scatters_) {
      sumUp(c, here_, segments);
    } else {
      for (int host = 0; host < hosts_.count(); ++host) sumUp(c, host, segments);
    }
    consume(segment);
    sendPartials(c);
  }

  /// Makes this host's partial results for another.
  void sumUp(std::size_t c, int host, const std::vector<const std::uint8_t*>& segments) {
    if (operand(c, host) != nullptr) return;
    const Piece part = piece(c, host);
    const std::size_t start = part.start * element_, size = part.count * element_;
    const std::size_t each = partialBytes(c, here_, host);
    std::uint8_t* out = outgoing(c, host);
    const std::size_t count = std::max<std::size_t>(targets(host), oneStep_ && !scatters_ ? 1 : 0);
    std::vector<const std::uint8_t*> operands(segments.size());
    for (std::size_t target = 0; target < count; ++target) {
      const std::size_t m = message(host, target);
      const Message& own = request_.in[m];
      operands[0] = own.contiguous(offset(c) + start, size);
      if (operands[0] == nullptr) {
        std::uint8_t* copy = enlarged(std::max<std::size_t>(size, 1), own_);
        own.read(offset(c) + start, size, copy);
        operands[0] = copy;
      }
      for (std::size_t local = 1; local < segments.size(); ++local) {
        operands[local] = segments[local] + m * bytes(c) + start;
      }
      for (std::size_t b = 0; b < sum_.subtrees(here_); ++b, out += each) {
        sum_.partial(static_cast<int>(b), operands, size, out);
      }
    }
  }

  void sendPartials(std::size_t c) {
    if (inFrames_) {
      return sendFrames([&](int host) {
        std::uint8_t* const frame = links_->frame(host);
        const std::size_t size = sentBytes(0, here_, host);
        std::memcpy(frame, partial(0, host), size);
        return size;
      });
    }
    for (const int host : links_->others()) {
      send(c, host, partial(c, host), sentBytes(c, here_, host));
    }
  }
  /// Whether all data goes to the root's host.
  bool oneWay() const { return rootHost_ >= 0 && oneStep_; }
  template <typename Write>
  void sendFrames(Write write) {
    links_->sendFrames(peers(), flow(), write);
  }
  Links::Flow flow() const {
    if (!oneWay()) return Links::Flow::Both;
    return rootHost_ == here_ ? Links::Flow::In : Links::Flow::Out;
  }
  std::vector<int> peers() const { return oneWay() ? links_->around(rootHost_) : links_->others(); }

  /// Sums this host's part over all hosts, and sends it on in the second step.
  void combine(std::size_t c) {
    if (!leads()) return;
    if (c == 0) links_->awaitFrames(peers(), flow());
    awaitReceives(c);
    if (oneStep_ && resultInPlace(c) != nullptr) awaitSends(c);  // the place may be the operand's
    const Piece part = piece(c, here_);
    const std::size_t size = part.count * element_;
    std::vector<const std::uint8_t*> partials(sum_.count());
    for (std::size_t target = 0; target < targets(here_); ++target) {
      for (std::size_t i = 0; i < partials.size(); ++i) {
        const Subtree& subtree = sum_.subtree(i);
        const std::size_t each = partialBytes(c, subtree.host, here_);
        const std::uint8_t* from =
            subtree.host == here_ ? partial(c, here_)
            : inFrames_           ? links_->frameOf(subtree.host, sentBytes(c, subtree.host, here_))
                                  : incoming(c, subtree.host);
        partials[i] = from + (target * sum_.subtrees(subtree.host) + subtree.index) * each;
      }
      std::uint8_t* out =
          result(c) + sum_.resultBytes(scatters_ ? target * bytes(c) : part.start * element_);
      sum_.total(partials, size, out);
    }
    if (oneStep_) return;
    for (const int host : links_->others()) {
      if (!wantsResult(host)) continue;
      send(c, host, result(c) + sum_.resultBytes(part.start * element_), sum_.resultBytes(size),
           Links::kSecondStep);
    }
  }

  /// Sends the result of a chunk to the ranks of this host.
  void finish(std::size_t c) {
    const std::size_t size = sum_.resultBytes(bytes(c));
    const std::size_t at = sum_.resultBytes(offset(c));
    const std::size_t parts = scatters_ ? hosts_.local().size() : 1;
    const bool root = isRoot();
    if (leads()) {
      awaitReceives(c, Links::kSecondStep);
      if (root && resultInPlace(c) == nullptr) request_.out[0].write(at, size, result(c));
    }
    if (stream_ == nullptr) return;
    const bool empty =
        rootHost_ >= 0 && (rootHost_ != here_ || request_.root == hosts_.leader(rootHost_));
    const Segment segment = place(empty ? 0 : size * parts);
    if (leads()) {
      stream_->fill(segment, [&](std::uint8_t* memory, bool streaming) {
        if (empty) return std::size_t{0};
        Message(result(c), size * parts).read(0, size * parts, memory, streaming);
        return size * parts;
      });
      publish(segment);
    } else {
      const std::uint8_t* memory = stream_->await(0, segment);
      if (root && !empty)
        request_.out[0].write(at, size, memory + (scatters_ ? localRank_ * size : 0));
    }
    consume(segment);
  }

  /// Adds the squares of this rank's share of the result; see Request::squares.
  void addSquares() {
    if (request_.squares == nullptr) return;
    const DType dtype = request_.outputFloat32 ? DType::Float32 : request_.dtype;
    const SquaresFn squared = squaresFunction(dtype);
    const std::size_t element = elementSize(dtype), part = elementSize(partOf(dtype));
    const int rank = hosts_.local()[localRank_];
    const Piece share = scatters_ ? Piece{0, total_} : pieceOf(total_, hosts_.size(), rank);
    std::vector<std::uint8_t> copy(4096);
    const std::size_t end = (share.start + share.count) * element;
    for (std::size_t at = share.start * element; at < end; at += copy.size()) {
      const std::size_t length = std::min(copy.size(), end - at);
      request_.out[0].read(at, length, copy.data());
      *request_.squares += squared(copy.data(), length / part);
    }
  }

  PartialSum sum_;
  const std::size_t element_;
  const bool scatters_;
  const int rootHost_;
  const int messages_;  // messages of a rank
  const std::size_t total_;
  const bool oneStep_;
  const Cut cut_;  // of the elements, into chunks
  const bool inFrames_;
  Scratch own_;
};

}  // namespace

void hierarchicalReduce(MultiHost& multiHost, const Request& request) {
  HierarchicalReduce(multiHost, request).run();
}

}  // namespace fastcoll
