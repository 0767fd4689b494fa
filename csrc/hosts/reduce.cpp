// All-reduce, reduce and reduce-scatter over several hosts.
//
// Phases, for each chunk of the message: the leader sums its host's operands, block by block
//         (block_sum.hpp). The leaders exchange partial results. A leader with those of all hosts
//         sums them. If a chunk was split among the hosts, all of them (all-reduce), or the root's
//         host (reduce), gather its parts. The leader publishes the result.
//         Chunks are in different phases at the same time, so the network is busy in all of them.
// Steps between hosts: 1 if each sends all its partial results to all others, else 2; see
//         selector.hpp. Two hosts take 1 unless partial results are long, and longer than the
//         result.
// Bytes that a host sends, for H hosts and a message of B: (H - 1) P in one step; in two steps
//         (H - 1) / H (P + B); reduce-scatter (H - 1) / H P. P, the host's partial results, is B
//         times its number of blocks. That is 1 if its ranks are an aligned run. Partial results
//         of 16-bit types that are not narrowed are twice as wide if a block is more than a rank.
#include <algorithm>
#include <cstring>

#include "block_sum.hpp"
#include "selector.hpp"
#include "spanning.hpp"

namespace fastcoll {
namespace {

// A message is cut into at least kChunks chunks, to be in several phases at once. But no chunk has
// less than kLeastPiece for a host.
constexpr std::size_t kChunks = 8;
constexpr std::size_t kLeastPiece = 256 * 1024;
// Longest chunk if no host has a segment to go through.
constexpr std::size_t kLongestChunk = std::size_t{2} << 20;

class SpanningReduce {
 public:
  SpanningReduce(Spanning& spanning, const Request& request)
      : spanning_(spanning),
        request_(request),
        hosts_(spanning.hosts),
        stream_(spanning.stream),
        links_(spanning.links.get()),
        sum_(request, hosts_),
        element_(elementSize(request.dtype)),
        scatters_(request.collective == Collective::ReduceScatter),
        rootHost_(request.collective == Collective::Reduce ? hosts_.hostOf(request.root) : -1),
        messages_(scatters_ ? hosts_.size() : 1),
        total_(request.in[0].bytes() / element_),
        oneStep_(scatters_ || takesOneStep()),
        lag_(oneStep_ ? 1 : 2),
        perChunk_(chunk()),
        chunks_(std::max<std::size_t>(1, ceilDiv(total_, perChunk_))),
        inFrames_(fitsFrames()),
        slots_(lag_ + 1) {
    if (leads()) spanning.scratch.resize(std::max(spanning.scratch.size(), scratches()));
  }

  void run() {
    if (stream_ != nullptr) {
      stream_->begin(request_.arrival(), {}, nullptr, request_.deadline, request_.timeout);
    }
    if (leads() && !inFrames_) {
      receive(0);
      sendFrames([](int) { return std::size_t{0}; });
    }
    for (std::size_t c = 0; c < chunks_ + lag_; ++c) {
      if (c < chunks_) gather(c);
      if (leads() && c >= 1 && c - 1 < chunks_) reduce(c - 1);
      if (c >= lag_) deliver(c - lag_);
    }
    if (leads()) {
      for (Slot& slot : slots_) settle(slot);
    }
    if (stream_ != nullptr) stream_->end();
    addSquares();
  }

 private:
  struct Slot {
    std::vector<std::pair<int, TransferRef>> sends, partials, results;
  };

  bool leads() const { return hosts_.leads(); }
  bool takesOneStep() const {
    const std::size_t bytes = request_.in[0].bytes();
    std::size_t most = 0;
    for (int host = 0; host < hosts_.count(); ++host) {
      most = std::max(most, sum_.blocks(host) * sum_.partialBytes(host, bytes));
    }
    return reducesInOneStep(hosts_.count(), most, sum_.resultBytes(bytes),
                            spanning_.tuning.linkBytes);
  }
  std::size_t chunk() const {
    const std::size_t longest = hosts_.most() > 1 ? spanning_.segmentBytes() : kLongestChunk;
    const std::size_t most = longest / messages_;
    const std::size_t hosts = oneStep_ ? 1 : hosts_.count();
    const std::size_t wanted = std::max(kLeastPiece * hosts, total_ * element_ / kChunks);
    const std::size_t elements = std::max<std::size_t>(1, std::min(most, wanted) / element_);
    return elements > 64 ? elements / 64 * 64 : elements;
  }
  /// Whether the whole exchange of one step, between all hosts, fits frames.
  bool fitsFrames() const {
    if (!oneStep_ || chunks_ > 1) return false;
    for (int from = 0; from < hosts_.count(); ++from) {
      for (int to = 0; to < hosts_.count(); ++to) {
        if (from != to && sentBytes(0, from, to) > Links::kInlineBytes) return false;
      }
    }
    return true;
  }

  std::size_t elements(std::size_t c) const { return std::min(perChunk_, total_ - c * perChunk_); }
  std::size_t bytes(std::size_t c) const { return elements(c) * element_; }
  std::size_t offset(std::size_t c) const { return c * perChunk_ * element_; }
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
    return targets(to) * sum_.blocks(from) * partialBytes(c, from, to);
  }

  // Scratch memory, for each slot: what goes to each host, what came from it, and the result.
  std::size_t scratches() const { return slots_.size() * (2 * hosts_.count() + 1); }
  std::uint8_t* memory(std::size_t c, std::size_t which, std::size_t size) {
    const std::size_t each = 2 * hosts_.count() + 1;
    return spanning_.scratch[c % slots_.size() * each + which].get(std::max<std::size_t>(size, 1));
  }
  /// The operand, if it is this one-rank host's partial result and contiguous; else null.
  const std::uint8_t* operand(std::size_t c, int host) const {
    const bool alone = sum_.plain(hosts_.here()) && sum_.blocks(hosts_.here()) == 1;
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
    const int shared = scatters_ || !oneStep_ ? host : hosts_.here();
    const std::size_t size = std::max<std::size_t>(targets(shared), 1) *
                             sum_.blocks(hosts_.here()) * partialBytes(c, hosts_.here(), shared);
    return memory(c, shared, size);
  }
  std::uint8_t* incoming(std::size_t c, int host) {
    return memory(c, hosts_.count() + host, sentBytes(c, host, hosts_.here()));
  }
  /// The result's place in the output, if no other rank of this host needs it and it is contiguous;
  /// else null. The order is safe with two steps: another host sends its part of the result only
  /// after it has received this host's operand of that part.
  std::uint8_t* placeOfResult(std::size_t c) const {
    if (stream_ != nullptr || !isRoot()) return nullptr;
    return request_.out[0].contiguous(sum_.resultBytes(offset(c)), sum_.resultBytes(bytes(c)));
  }
  std::uint8_t* result(std::size_t c) {
    if (std::uint8_t* out = placeOfResult(c)) return out;
    const std::size_t parts = scatters_ ? hosts_.local().size() : 1;
    return memory(c, 2 * hosts_.count(), parts * sum_.resultBytes(bytes(c)));
  }
  Slot& slot(std::size_t c) { return slots_[c % slots_.size()]; }

  /// Waits until no send uses the slot's memory.
  void settle(Slot& slot) {
    for (auto& [host, send] : slot.sends) links_->wait(host, send);
    slot.sends.clear();
  }

  void receive(std::size_t c) {
    if (inFrames_) return;
    for (const int host : links_->others()) {
      const std::size_t size = sentBytes(c, host, hosts_.here());
      if (size == 0) continue;
      slot(c).partials.emplace_back(host, links_->receive(host, incoming(c, host), size));
    }
    if (oneStep_ || !wantsResult(hosts_.here())) return;
    for (const int host : links_->others()) {
      const Piece part = piece(c, host);
      const std::size_t size = sum_.resultBytes(part.count * element_);
      if (size == 0) continue;
      std::uint8_t* place = result(c) + sum_.resultBytes(part.start * element_);
      slot(c).results.emplace_back(host, links_->receive(host, place, size, Links::kSecondStep));
    }
  }
  bool isRoot() const { return rootHost_ < 0 || request_.root == hosts_.local()[place()]; }
  bool wantsResult(int host) const { return rootHost_ < 0 || host == rootHost_; }

  /// Sends the operands of a chunk to the leader, and the leader's partial results to other hosts.
  void gather(std::size_t c) {
    Segment segment;
    const std::size_t size = bytes(c);
    if (stream_ != nullptr) {
      segment = stream_->place(size * messages_);
      if (!leads()) {
        stream_->fill(segment, [&](std::uint8_t* memory, bool streaming) {
          for (std::size_t m = 0; m < static_cast<std::size_t>(messages_); ++m) {
            request_.in[m].read(offset(c), size, memory + m * size, streaming);
          }
          return size * messages_;
        });
        stream_->publish(segment);
        stream_->consume(segment);
        return;
      }
      if (c == 0) stream_->publish(segment);  // announces only its arrival
    }
    settle(slot(c));
    if (c > 0) receive(c);
    std::vector<const std::uint8_t*> segments(hosts_.local().size(), nullptr);
    for (std::size_t place = 1; place < segments.size(); ++place) {
      segments[place] = stream_->await(static_cast<int>(place), segment);
    }
    const bool shared = oneStep_ && !scatters_;
    if (shared) {
      sumUp(c, hosts_.here(), segments);
    } else {
      for (int host = 0; host < hosts_.count(); ++host) sumUp(c, host, segments);
    }
    if (stream_ != nullptr) stream_->consume(segment);
    send(c);
  }

  /// Makes this host's partial results for another.
  void sumUp(std::size_t c, int host, const std::vector<const std::uint8_t*>& segments) {
    if (operand(c, host) != nullptr) return;
    const Piece part = piece(c, host);
    const std::size_t start = part.start * element_, size = part.count * element_;
    const std::size_t each = partialBytes(c, hosts_.here(), host);
    std::uint8_t* out = outgoing(c, host);
    const std::size_t count = std::max<std::size_t>(targets(host), oneStep_ && !scatters_ ? 1 : 0);
    std::vector<const std::uint8_t*> operands(segments.size());
    for (std::size_t target = 0; target < count; ++target) {
      const std::size_t m = message(host, target);
      const Message& own = request_.in[m];
      operands[0] = own.contiguous(offset(c) + start, size);
      if (operands[0] == nullptr) {
        std::uint8_t* copy = own_.get(std::max<std::size_t>(size, 1));
        own.read(offset(c) + start, size, copy);
        operands[0] = copy;
      }
      for (std::size_t place = 1; place < segments.size(); ++place) {
        operands[place] = segments[place] + m * bytes(c) + start;
      }
      for (std::size_t b = 0; b < sum_.blocks(hosts_.here()); ++b, out += each) {
        sum_.partial(static_cast<int>(b), operands, size, out);
      }
    }
  }

  void send(std::size_t c) {
    if (inFrames_) {
      return sendFrames([&](int host) {
        std::uint8_t* const frame = links_->frame(host);
        const std::size_t size = sentBytes(0, hosts_.here(), host);
        std::memcpy(frame, partial(0, host), size);
        return size;
      });
    }
    for (const int host : links_->others()) {
      const std::size_t size = sentBytes(c, hosts_.here(), host);
      if (size == 0) continue;
      slot(c).sends.emplace_back(host, links_->send(host, partial(c, host), size));
    }
  }
  /// Whether all data goes to the root's host.
  bool oneWay() const { return rootHost_ >= 0 && oneStep_; }
  template <typename Write>
  void sendFrames(Write write) {
    links_->sendFrames(peers(), flow(), write);
  }
  void awaitFrames() { links_->awaitFrames(peers(), flow()); }
  Links::Flow flow() const {
    if (!oneWay()) return Links::Flow::Both;
    return rootHost_ == hosts_.here() ? Links::Flow::In : Links::Flow::Out;
  }
  std::vector<int> peers() const { return oneWay() ? links_->around(rootHost_) : links_->others(); }

  /// Sums this host's part over all hosts, and sends it on in the second step.
  void reduce(std::size_t c) {
    if (c == 0) awaitFrames();
    for (auto& [host, transfer] : slot(c).partials) links_->wait(host, transfer);
    slot(c).partials.clear();
    if (oneStep_ && placeOfResult(c) != nullptr) settle(slot(c));  // the place may be the operand's
    const int here = hosts_.here();
    const Piece part = piece(c, here);
    const std::size_t size = part.count * element_;
    std::vector<const std::uint8_t*> partials(sum_.count());
    for (std::size_t target = 0; target < targets(here); ++target) {
      for (std::size_t i = 0; i < partials.size(); ++i) {
        const Block& block = sum_.block(i);
        const std::size_t each = partialBytes(c, block.host, here);
        const std::uint8_t* from = block.host == here ? partial(c, here)
                                   : inFrames_
                                       ? links_->frameOf(block.host, sentBytes(c, block.host, here))
                                       : incoming(c, block.host);
        partials[i] = from + (target * sum_.blocks(block.host) + block.index) * each;
      }
      std::uint8_t* out =
          result(c) + sum_.resultBytes(scatters_ ? target * bytes(c) : part.start * element_);
      sum_.total(partials, size, out);
    }
    if (oneStep_) return;
    for (const int host : links_->others()) {
      if (!wantsResult(host) || size == 0) continue;
      const std::uint8_t* from = result(c) + sum_.resultBytes(part.start * element_);
      slot(c).sends.emplace_back(
          host, links_->send(host, from, sum_.resultBytes(size), Links::kSecondStep));
    }
  }

  /// Sends the result of a chunk to the ranks of this host.
  void deliver(std::size_t c) {
    const std::size_t size = sum_.resultBytes(bytes(c));
    const std::size_t at = sum_.resultBytes(offset(c));
    const std::size_t parts = scatters_ ? hosts_.local().size() : 1;
    const bool root = isRoot();
    if (leads()) {
      for (auto& [host, transfer] : slot(c).results) links_->wait(host, transfer);
      slot(c).results.clear();
      if (root && placeOfResult(c) == nullptr) request_.out[0].write(at, size, result(c));
    }
    if (stream_ == nullptr) return;
    const bool empty =
        rootHost_ >= 0 && (rootHost_ != hosts_.here() || request_.root == hosts_.leader(rootHost_));
    const Segment segment = stream_->place(empty ? 0 : size * parts);
    if (leads()) {
      stream_->fill(segment, [&](std::uint8_t* memory, bool streaming) {
        if (empty) return std::size_t{0};
        Message(result(c), size * parts).read(0, size * parts, memory, streaming);
        return size * parts;
      });
      stream_->publish(segment);
    } else {
      const std::uint8_t* memory = stream_->await(0, segment);
      if (root && !empty)
        request_.out[0].write(at, size, memory + (scatters_ ? place() * size : 0));
    }
    stream_->consume(segment);
  }
  std::size_t place() const { return hosts_.place(); }

  /// Adds the squares of this rank's share of the result; see Request::squares.
  void addSquares() {
    if (request_.squares == nullptr) return;
    const DType dtype = request_.widened ? DType::Float32 : request_.dtype;
    const SquaresFn squared = squaresFunction(dtype);
    const std::size_t element = elementSize(dtype), part = elementSize(partOf(dtype));
    const int rank = hosts_.local()[place()];
    const Piece share = scatters_ ? Piece{0, total_} : pieceOf(total_, hosts_.size(), rank);
    std::vector<std::uint8_t> copy(4096);
    const std::size_t end = (share.start + share.count) * element;
    for (std::size_t at = share.start * element; at < end; at += copy.size()) {
      const std::size_t length = std::min(copy.size(), end - at);
      request_.out[0].read(at, length, copy.data());
      *request_.squares += squared(copy.data(), length / part);
    }
  }

  Spanning& spanning_;
  const Request& request_;
  const Hosts& hosts_;
  SegmentStream* const stream_;
  Links* const links_;
  BlockSum sum_;
  const std::size_t element_;
  const bool scatters_;
  const int rootHost_;
  const int messages_;  // messages of a rank
  const std::size_t total_;
  const bool oneStep_;
  const std::size_t lag_;       // chunks that are gathered before the first is handed out
  const std::size_t perChunk_;  // elements
  const std::size_t chunks_;
  const bool inFrames_;
  std::vector<Slot> slots_;
  Scratch own_;
};

}  // namespace

void spanningReduce(Spanning& spanning, const Request& request) {
  SpanningReduce(spanning, request).run();
}

}  // namespace fastcoll
