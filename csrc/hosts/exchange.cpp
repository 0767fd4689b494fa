// All-gather, gather, scatter and all-to-all over several hosts.
//
// Phases: the ranks of a host exchange data as on one host. A long message for one rank of another
//         host goes there directly (long_messages.hpp). For the rest every rank has a parcel for
//         each other host: all that the ranks there get from it. In each step the leader collects a
//         slice of every parcel, exchanges slices with the other leaders, and publishes those that
//         have arrived. Each rank takes its own data from them.
// Steps between hosts: 1 if the parcels fit frames, else 1 and 1 a step.
// Bytes that a host sends: what the ranks of other hosts get from its ranks, once for each host:
//         all-gather of B in all (H - 1) / H B.
#include <algorithm>
#include <cstring>

#include "parcels.hpp"
#include "spanning.hpp"

namespace fastcoll {
namespace {

class SpanningExchange {
 public:
  SpanningExchange(Spanning& spanning, const Request& request)
      : spanning_(spanning),
        request_(request),
        hosts_(spanning.hosts),
        stream_(spanning.stream),
        links_(spanning.links.get()),
        here_(hosts_.here()),
        place_(hosts_.place()),
        ranks_(hosts_.size()),
        rank_(hosts_.local()[place_]),
        parcels_(hosts_, request),
        long_(spanning, request) {
    if (hosts_.leads()) {
      const std::size_t wanted = 2 * kSlots * hosts_.count();
      spanning.scratch.resize(std::max(spanning.scratch.size(), wanted));
    }
  }

  void run() {
    addLong();
    long_.begin();
    among();
    begin();
    parcels_.tellSizes(stream_, spanning_.segmentBytes());
    parcels_.cut(hosts_.most() > 1 ? spanning_.segmentBytes() : kLongestStep);
    const std::size_t steps = parcels_.steps();
    for (std::size_t k = 0; k <= steps; ++k) {
      if (k < steps) collect(k);
      if (k > 0) handOut(k - 1);
    }
    if (links_ != nullptr) {
      for (auto& sends : sends_) settle(sends);
    }
    long_.finish();
    if (stream_ != nullptr) stream_->end();
  }

 private:
  static constexpr std::size_t kSlots = 2;
  // Bytes of a step if no host has a segment to go through.
  static constexpr std::size_t kLongestStep = std::size_t{4} << 20;
  using Transfers = std::vector<std::pair<int, TransferRef>>;
  struct Step {
    Segment in, out;
    Transfers receives;
  };

  /// Adds the messages of this rank that are in no parcel.
  void addLong() {
    for (int host = (here_ + 1) % hosts_.count(); host != here_;
         host = (host + 1) % hosts_.count()) {
      for (const int peer : hosts_.ranks(host)) {
        const std::size_t with = peer;
        const bool root = static_cast<int>(rank_) == request_.root, toRoot = peer == request_.root;
        switch (request_.collective) {
          case Collective::AllToAll:
            receiveLong(peer, request_.out[with]);
            sendLong(peer, request_.in[with]);
            break;
          case Collective::Gather:
            if (root) receiveLong(peer, request_.out[with]);
            if (toRoot) sendLong(peer, request_.in[0]);
            break;
          case Collective::Scatter:
            if (toRoot) receiveLong(peer, request_.out[0]);
            if (root) sendLong(peer, request_.in[with]);
            break;
          default:
            break;
        }
      }
    }
  }
  void sendLong(int to, const Message& message) {
    if (parcels_.isLong(message.bytes())) long_.send(to, message);
  }
  void receiveLong(int from, const Message& message) {
    if (parcels_.isLong(message.bytes())) long_.receive(from, message);
  }

  void begin() {
    if (stream_ == nullptr) return;
    stream_->begin(request_.arrival(), localCounts(), nullptr, request_.deadline, request_.timeout);
  }
  /// The counts that the peers on this host announce, if they differ from this rank's.
  std::vector<std::uint64_t> localCounts() const {
    std::vector<std::uint64_t> counts;
    if (request_.expectedCount.empty()) return counts;
    for (const int rank : hosts_.local()) {
      counts.push_back(request_.expectedCount[rank]);
    }
    return counts;
  }

  /// The part of the collective among the ranks of this host.
  void among() {
    const bool rooted = request_.root >= 0;
    if (rooted && hosts_.hostOf(request_.root) != here_) return;
    const auto& local = hosts_.local();
    Request part = request_;
    part.joined = false;
    part.expectedCount = localCounts();
    const auto subset = [&](std::vector<Message>& messages) {
      if (messages.size() != ranks_) return;
      std::vector<Message> chosen;
      for (const int rank : local) chosen.push_back(messages[rank]);
      messages = std::move(chosen);
    };
    if (request_.collective != Collective::AllGather) subset(part.in);
    if (request_.collective != Collective::Scatter) subset(part.out);
    if (rooted) {
      part.root =
          static_cast<int>(std::find(local.begin(), local.end(), request_.root) - local.begin());
    }
    if (stream_ != nullptr) {
      runCollective(*stream_, part, spanning_.tuning);
    } else {
      part.in[0].copyTo(part.out[0]);
    }
  }

  // --- collecting, exchanging, handing out -----------------------------------------------------

  /// Writes this rank's slice of its parcel for a host.
  std::size_t write(int to, std::size_t k, std::uint8_t* memory) const {
    const std::size_t length = parcels_.sliceBytes(here_, place_, to, k);
    const std::size_t start = parcels_.start(k);
    if (!parcels_.isAllToAll() && request_.collective != Collective::Scatter) {
      request_.in[0].read(start, length, memory);
      return length;
    }
    std::size_t at = 0;  // in the parcel
    for (const int peer : hosts_.ranks(to)) {
      if (length == 0) break;
      const Message& message = request_.in[peer];
      if (parcels_.isLong(message.bytes())) continue;
      overlap(at, message.bytes(), start, length,
              [&](std::size_t within, std::size_t from, std::size_t bytes) {
                message.read(within, bytes, memory + from);
              });
      at += message.bytes();
    }
    return length;
  }
  /// Calls use(offset in the message, offset in the slice, bytes) for what both have in common.
  template <typename Use>
  static void overlap(std::size_t at, std::size_t bytes, std::size_t start, std::size_t length,
                      Use use) {
    const std::size_t from = std::max(at, start), to = std::min(at + bytes, start + length);
    if (from < to) use(from - at, from - start, to - from);
  }

  Step& step(std::size_t k) { return steps_[k % kSlots]; }
  std::uint8_t* scratch(std::size_t k, int host, bool out, std::size_t bytes) {
    const std::size_t which = ((k % kSlots) * 2 + (out ? 1 : 0)) * hosts_.count() + host;
    return spanning_.scratch[which].get(std::max<std::size_t>(bytes, 1));
  }
  /// The place of an all-gather's slice in a message, where the network reads or writes it. Null
  /// unless this rank is alone on its host and the slice is contiguous.
  std::uint8_t* lone(const Message& message, std::size_t k, std::size_t size) const {
    return stream_ == nullptr ? message.contiguous(parcels_.start(k), size) : nullptr;
  }
  /// Where the slices of another host arrive, for a rank that is alone on its host.
  std::uint8_t* arriving(int host, std::size_t k, std::size_t size) {
    const auto& ranks = hosts_.ranks(host);
    std::uint8_t* const into =
        parcels_.areShared() && ranks.size() == 1 ? lone(request_.out[ranks[0]], k, size) : nullptr;
    return into != nullptr ? into : scratch(k, host, false, size);
  }
  void settle(Transfers& transfers) {
    for (auto& [host, transfer] : transfers) links_->wait(host, transfer);
    transfers.clear();
  }

  void collect(std::size_t k) {
    Step& now = step(k);
    if (stream_ != nullptr) {
      now.in = stream_->place(parcels_.mostIn(k));
      now.out = stream_->place(parcels_.placeOut(hosts_.count(), k));
    }
    if (!hosts_.leads()) {
      stream_->fill(now.in, [&](std::uint8_t* memory, bool) {
        std::size_t written = 0;
        for (int host = 0; host < hosts_.count(); ++host) {
          if (host == here_ || (parcels_.areShared() && written > 0)) continue;
          written += write(host, k, memory + written);
        }
        return written;
      });
      return stream_->publish(now.in);
    }
    if (stream_ != nullptr && k == 0) stream_->publish(now.in);  // announces only its arrival
    settle(sends_[k % kSlots]);
    receive(k);
    if (k == 0) sendFrames();
    for (const int host : links_->others()) {
      const std::size_t size = parcels_.slices(here_, host, k);
      if (size == 0 || parcels_.inFrame(here_, host)) continue;
      const std::uint8_t* from = parcels_.areShared() ? lone(request_.in[0], k, size) : nullptr;
      if (from == nullptr) {
        std::uint8_t* const memory = scratch(k, host, true, size);
        gather(host, k, memory);
        from = memory;
      }
      sends_[k % kSlots].emplace_back(host, links_->send(host, from, size));
    }
    if (stream_ != nullptr) stream_->consume(now.in);
  }

  /// Concatenates the slices of this host's ranks for another host.
  void gather(int host, std::size_t k, std::uint8_t* to) {
    for (std::size_t p = 0; p < hosts_.local().size(); ++p) {
      const std::size_t length = parcels_.sliceBytes(here_, p, host, k);
      if (p == place_) {
        write(host, k, to);
      } else {
        const std::uint8_t* from = stream_->await(static_cast<int>(p), step(k).in);
        std::memcpy(to, from + parcels_.placeIn(p, host, k), length);
      }
      to += length;
    }
  }

  void receive(std::size_t k) {
    Step& now = step(k);
    std::uint8_t* segment = stream_ != nullptr ? stream_->acquire(now.out) : nullptr;
    for (const int host : links_->others()) {
      const std::size_t size = parcels_.slices(host, here_, k);
      if (size == 0 || parcels_.inFrame(host, here_)) continue;
      std::uint8_t* memory =
          segment != nullptr ? segment + parcels_.placeOut(host, k) : arriving(host, k, size);
      now.receives.emplace_back(host, links_->receive(host, memory, size));
    }
  }

  void sendFrames() {
    if (stream_ != nullptr) stream_->awaitArrivals();
    const bool rooted = request_.root >= 0;
    const int rootHost = rooted ? hosts_.hostOf(request_.root) : -1;
    peers_ = rooted ? links_->around(rootHost) : links_->others();
    const bool scatter = request_.collective == Collective::Scatter;
    // Ranks with long messages wait for the other host anyway. Its answer shows that it runs this
    // collective.
    gives_ = rooted && scatter == (rootHost == here_) &&
             !parcels_.isLong((scatter ? request_.out : request_.in)[0].bytes());
    const auto write = [this](int host) { return writeFrame(host); };
    if (gives_) {
      links_->give(peers_, write);
    } else if (rooted && scatter != (rootHost == here_)) {
      for (const int host : peers_) links_->answer(host);
    } else {
      links_->sendFrames(peers_, write);
    }
  }
  void awaitFrames() {
    if (gives_) return;
    links_->awaitFrames(peers_);
    for (const int host : peers_) {
      if (parcels_.isAllToAll()) parcels_.compareHead(*links_, host);
      (void)frameData(host);
    }
  }
  std::size_t writeFrame(int host) {
    std::uint8_t* const frame = links_->frame(host);
    std::uint8_t* at = frame;
    if (parcels_.isAllToAll()) at = parcels_.writeHead(host, at);
    if (parcels_.inFrame(here_, host)) {
      gather(host, 0, at);
      at += parcels_.slices(here_, host, 0);
    }
    return at - frame;
  }

  /// The slices in a host's frame.
  const std::uint8_t* frameData(int host) const {
    const std::size_t head = parcels_.headBytes(host, here_);
    const std::size_t data = parcels_.inFrame(host, here_) ? parcels_.slices(host, here_, 0) : 0;
    return links_->frameOf(host, head + data) + head;
  }

  void handOut(std::size_t k) {
    Step& now = step(k);
    const std::uint8_t* segment = nullptr;
    if (hosts_.leads()) {
      if (k == 0) awaitFrames();
      settle(now.receives);
      if (stream_ != nullptr) {
        std::uint8_t* memory = stream_->acquire(now.out);
        for (const int host : links_->others()) {
          const std::size_t size = parcels_.slices(host, here_, k);
          if (size == 0 || !parcels_.inFrame(host, here_)) continue;
          std::memcpy(memory + parcels_.placeOut(host, k), frameData(host), size);
        }
        stream_->publish(now.out);
        segment = memory;
      }
    } else {
      segment = stream_->await(0, now.out);
    }
    for (int host = 0; host < hosts_.count(); ++host) {
      const std::size_t size = host == here_ ? 0 : parcels_.slices(host, here_, k);
      if (size == 0) continue;
      const std::uint8_t* from = segment != nullptr ? segment + parcels_.placeOut(host, k)
                                 : parcels_.inFrame(host, here_) ? frameData(host)
                                                                 : arriving(host, k, size);
      for (std::size_t p = 0; p < hosts_.ranks(host).size(); ++p) {
        take(host, p, k, from);
        from += parcels_.sliceBytes(host, p, here_, k);
      }
    }
    if (stream_ != nullptr) stream_->consume(now.out);
  }

  /// Takes this rank's data from a slice.
  void take(int host, std::size_t place, std::size_t k, const std::uint8_t* slice) const {
    const std::size_t start = parcels_.start(k),
                      length = parcels_.sliceBytes(host, place, here_, k);
    const std::size_t sender = hosts_.ranks(host)[place];
    switch (request_.collective) {
      case Collective::AllGather:
        return request_.out[sender].write(start, length, slice);
      case Collective::Gather:
        if (static_cast<int>(rank_) == request_.root) {
          request_.out[sender].write(start, length, slice);
        }
        return;
      default: {
        const bool scatter = request_.collective == Collective::Scatter;
        const Message& message = request_.out[scatter ? 0 : sender];
        if (parcels_.isLong(message.bytes())) return;
        std::size_t at = place_ * message.bytes();  // in the parcel
        if (!scatter) {
          at = 0;
          for (std::size_t p = 0; p < place_; ++p)
            at += parcels_.carried(parcels_.expected(p, static_cast<int>(sender)));
        }
        overlap(at, message.bytes(), start, length,
                [&](std::size_t within, std::size_t from, std::size_t bytes) {
                  message.write(within, bytes, slice + from);
                });
      }
    }
  }

  Spanning& spanning_;
  const Request& request_;
  const Hosts& hosts_;
  SegmentStream* const stream_;
  Links* const links_;
  const int here_;
  const std::size_t place_;
  const std::size_t ranks_;
  const std::size_t rank_;
  Parcels parcels_;
  LongMessages long_;
  std::vector<int> peers_;  // hosts that this one exchanges frames with
  bool gives_ = false;      // this host sends data to them, and gets none
  Step steps_[kSlots];
  Transfers sends_[kSlots];
};

}  // namespace

void spanningExchange(Spanning& spanning, const Request& request) {
  SpanningExchange(spanning, request).run();
}

}  // namespace fastcoll
