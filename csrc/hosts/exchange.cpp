// All-gather, gather, scatter and all-to-all over several hosts.
//
// Phases: the ranks of a host serve each other as on one host. Beside that every rank has a parcel
//         for each other host: what its ranks are to get from it. In each step the leader collects
//         a slice of every parcel, exchanges them with the other leaders, and hands out those that
//         have come; each rank takes from them what is for it.
// Steps between hosts: 1 where the parcels fit frames, else 1 and 1 a step.
// Bytes that a host sends: what the ranks of other hosts get from its ranks, once for each host:
//         all-gather of B in all (H - 1) / H B.
#include <algorithm>
#include <cstring>

#include "spanning.hpp"

namespace fastcoll {
namespace {

using Sizes = std::vector<std::uint64_t>;

class SpanningExchange {
 public:
  SpanningExchange(Spanning& spanning, const Request& request)
      : spanning_(spanning),
        request_(request),
        hosts_(spanning.hosts),
        stream_(spanning.stream),
        links_(spanning.links.get()),
        here_(hosts_.here()),
        place_(static_cast<std::size_t>(hosts_.place())),
        ranks_(static_cast<std::size_t>(hosts_.size())),
        rank_(static_cast<std::size_t>(hosts_.local()[place_])) {
    if (hosts_.leads()) {
      const std::size_t wanted = 2 * kSlots * static_cast<std::size_t>(hosts_.count());
      spanning.scratch.resize(std::max(spanning.scratch.size(), wanted));
    }
  }

  void run() {
    among();
    begin();
    tellSizes();
    // A segment holds a slice of each parcel of its rank, or, the leader's, of each that comes:
    // equal on all hosts.
    const std::size_t given = sharesParcel() ? 1 : static_cast<std::size_t>(hosts_.count() - 1);
    const std::size_t taken = request_.collective == Collective::Scatter ? 1 : ranks_;
    const std::size_t room = hosts_.most() > 1 ? spanning_.segmentBytes() : kLongestStep;
    slice_ = std::max<std::size_t>(1, room / std::max(given, taken));
    std::size_t steps = 1;
    for (int host = 0; host < hosts_.count(); ++host) {
      if (host != here_) steps = std::max({steps, stepsOf(here_, host), stepsOf(host, here_)});
    }
    for (std::size_t k = 0; k <= steps; ++k) {
      if (k < steps) collect(k);
      if (k > 0) handOut(k - 1);
    }
    if (links_ != nullptr) {
      for (auto& sends : sends_) settle(sends);
      links_->end();
    }
    if (stream_ != nullptr) stream_->end();
  }

 private:
  static constexpr std::size_t kSlots = 2;
  // Bytes of a step where no host has a segment to go through.
  static constexpr std::size_t kLongestStep = std::size_t{2} << 20;
  using Transfers = std::vector<std::pair<int, TransferRef>>;
  struct Step {
    Segment in, out;
    Transfers receives;
  };

  void begin() {
    if (stream_ == nullptr) return;
    stream_->begin(request_.arrival(), localCounts(), nullptr, request_.deadline, request_.timeout);
  }
  /// What the peers on this host announce, where it differs from what this rank does.
  Sizes localCounts() const {
    Sizes counts;
    if (request_.expectedCount.empty()) return counts;
    for (const int rank : hosts_.local()) {
      counts.push_back(request_.expectedCount[static_cast<std::size_t>(rank)]);
    }
    return counts;
  }

  /// The part of it among the ranks of this host.
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
      for (const int rank : local) chosen.push_back(messages[static_cast<std::size_t>(rank)]);
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

  // --- sizes -------------------------------------------------------------------------------------

  bool isAllToAll() const { return request_.collective == Collective::AllToAll; }

  /// All-to-all: every rank of this host tells the others what it sends and expects.
  void tellSizes() {
    if (!isAllToAll()) return;
    Sizes own(2 * ranks_);
    for (std::size_t peer = 0; peer < ranks_; ++peer) {
      own[peer] = request_.in[peer].bytes();
      own[ranks_ + peer] = request_.out[peer].bytes();
    }
    told_.assign(hosts_.local().size(), {});
    told_[place_] = own;
    if (stream_ == nullptr) return;
    const std::size_t size = own.size() * sizeof own[0];
    const std::size_t most = std::max<std::size_t>(spanning_.segmentBytes() / sizeof own[0], 8);
    for (std::size_t first = 0; first < own.size(); first += most) {
      const std::size_t count = std::min(most, own.size() - first);
      const Segment segment = stream_->place(std::min(size, count * sizeof own[0]));
      stream_->fill(segment, [&](std::uint8_t* memory, bool) {
        std::memcpy(memory, own.data() + first, count * sizeof own[0]);
        return count * sizeof own[0];
      });
      stream_->publish(segment);
      for (std::size_t p = 0; p < told_.size(); ++p) {
        if (p == place_) continue;
        told_[p].resize(own.size());
        const std::uint8_t* memory = stream_->await(static_cast<int>(p), segment);
        std::memcpy(told_[p].data() + first, memory, count * sizeof own[0]);
      }
      stream_->consume(segment);
    }
  }

  /// Bytes that rank `to` of this host expects of another host's rank, and the other way.
  std::uint64_t expected(std::size_t place, int from) const {
    return told_[place][ranks_ + static_cast<std::size_t>(from)];
  }
  std::uint64_t given(std::size_t place, int to) const {
    return told_[place][static_cast<std::size_t>(to)];
  }

  /// Bytes of the parcel of a host's rank for another host; one of the two is this one.
  std::size_t parcel(int from, std::size_t place, int to) const {
    const int rank = hosts_.ranks(from)[place];
    switch (request_.collective) {
      case Collective::AllGather:
        return request_.out[static_cast<std::size_t>(rank)].bytes();
      case Collective::Gather:
        return to == hosts_.hostOf(request_.root) ? request_.in[0].bytes() : 0;
      case Collective::Scatter:
        return rank == request_.root ? request_.out[0].bytes() * hosts_.ranks(to).size() : 0;
      default: {
        std::size_t sum = 0;
        if (from == here_) {
          for (const int peer : hosts_.ranks(to)) sum += given(place, peer);
        } else {
          for (std::size_t p = 0; p < told_.size(); ++p) sum += expected(p, rank);
        }
        return sum;
      }
    }
  }
  std::size_t sliceBytes(int from, std::size_t place, int to, std::size_t k) const {
    const std::size_t all = parcel(from, place, to);
    return k * slice_ >= all ? 0 : std::min(slice_, all - k * slice_);
  }
  /// Of all ranks of a host, in a step.
  std::size_t slices(int from, int to, std::size_t k) const {
    std::size_t sum = 0;
    for (std::size_t p = 0; p < hosts_.ranks(from).size(); ++p) sum += sliceBytes(from, p, to, k);
    return sum;
  }
  std::size_t stepsOf(int from, int to) const {
    std::size_t most = 0;
    for (std::size_t p = 0; p < hosts_.ranks(from).size(); ++p) {
      most = std::max(most, parcel(from, p, to));
    }
    return ceilDiv(most, slice_);
  }
  /// Bytes of sizes at the head of a frame.
  std::size_t headBytes(int from, int to) const {
    if (!isAllToAll()) return 0;
    return 2 * sizeof(std::uint64_t) * hosts_.ranks(from).size() * hosts_.ranks(to).size();
  }
  /// The parcels from one host to another go with their frame.
  bool inFrame(int from, int to) const {
    return stepsOf(from, to) <= 1 &&
           headBytes(from, to) + slices(from, to, 0) <= Links::kInlineBytes;
  }

  // --- collecting, exchanging, handing out -----------------------------------------------------

  bool sharesParcel() const { return request_.collective == Collective::AllGather; }
  /// Where a rank's slice for a host begins in its segment.
  std::size_t placeIn(std::size_t place, int to, std::size_t k) const {
    std::size_t at = 0;
    for (int host = 0; host < to && !sharesParcel(); ++host) {
      if (host != here_) at += sliceBytes(here_, place, host, k);
    }
    return at;
  }
  /// Where a host's slices begin in the leader's segment.
  std::size_t placeOut(int from, std::size_t k) const {
    std::size_t at = 0;
    for (int host = 0; host < from; ++host) {
      if (host != here_) at += slices(host, here_, k);
    }
    return at;
  }
  std::size_t mostIn(std::size_t k) const {
    std::size_t most = 0;
    for (std::size_t p = 0; p < hosts_.local().size(); ++p) {
      const int last = hosts_.count() - 1 == here_ ? hosts_.count() - 2 : hosts_.count() - 1;
      most = std::max(most, placeIn(p, last, k) + sliceBytes(here_, p, last, k));
    }
    return most;
  }

  /// Writes this rank's slice of its parcel for a host.
  std::size_t write(int to, std::size_t k, std::uint8_t* memory) const {
    const std::size_t length = sliceBytes(here_, place_, to, k);
    const std::size_t start = k * slice_;
    if (!isAllToAll() && request_.collective != Collective::Scatter) {
      request_.in[0].read(start, length, memory);
      return length;
    }
    std::size_t at = 0;  // in the parcel
    for (const int peer : hosts_.ranks(to)) {
      if (length == 0) break;
      const Message& message = request_.in[static_cast<std::size_t>(peer)];
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
    const std::size_t which =
        ((k % kSlots) * 2 + (out ? 1 : 0)) * static_cast<std::size_t>(hosts_.count()) +
        static_cast<std::size_t>(host);
    return spanning_.scratch[which].get(std::max<std::size_t>(bytes, 1));
  }
  /// Where a slice of an all-gather lies in a message of a rank that is alone on its host, if in
  /// one piece: then the network takes it from there, or puts it there.
  std::uint8_t* lone(const Message& message, std::size_t k, std::size_t size) const {
    return sharesParcel() && stream_ == nullptr ? message.contiguous(k * slice_, size) : nullptr;
  }
  /// Where the slices of another host come to, of a rank that is alone on its own.
  std::uint8_t* arriving(int host, std::size_t k, std::size_t size) {
    const auto& ranks = hosts_.ranks(host);
    std::uint8_t* const into =
        ranks.size() > 1
            ? nullptr
            : lone(request_.out[static_cast<std::size_t>(ranks[0]) % request_.out.size()], k, size);
    return into != nullptr ? into : scratch(k, host, false, size);
  }
  void settle(Transfers& transfers) {
    for (auto& [host, transfer] : transfers) links_->wait(host, transfer);
    transfers.clear();
  }

  void collect(std::size_t k) {
    Step& now = step(k);
    if (stream_ != nullptr) {
      now.in = stream_->place(mostIn(k));
      now.out = stream_->place(placeOut(hosts_.count(), k));
    }
    if (!hosts_.leads()) {
      stream_->fill(now.in, [&](std::uint8_t* memory, bool) {
        std::size_t written = 0;
        for (int host = 0; host < hosts_.count(); ++host) {
          if (host == here_ || (sharesParcel() && written > 0)) continue;
          written += write(host, k, memory + written);
        }
        return written;
      });
      return stream_->publish(now.in);
    }
    if (stream_ != nullptr && k == 0) stream_->publish(now.in);  // nothing but its arrival
    settle(sends_[k % kSlots]);
    receive(k);
    if (k == 0) frames();
    for (const int host : links_->others()) {
      const std::size_t size = slices(here_, host, k);
      if (size == 0 || inFrame(here_, host)) continue;
      const std::uint8_t* from = lone(request_.in[0], k, size);
      if (from == nullptr) {
        std::uint8_t* const memory = scratch(k, host, true, size);
        gather(host, k, memory);
        from = memory;
      }
      sends_[k % kSlots].emplace_back(host, links_->send(host, from, size));
    }
    if (stream_ != nullptr) stream_->consume(now.in);
  }

  /// Puts the slices of this host's ranks for another behind each other.
  void gather(int host, std::size_t k, std::uint8_t* to) {
    for (std::size_t p = 0; p < hosts_.local().size(); ++p) {
      const std::size_t length = sliceBytes(here_, p, host, k);
      if (p == place_) {
        write(host, k, to);
      } else {
        const std::uint8_t* from = stream_->await(static_cast<int>(p), step(k).in);
        std::memcpy(to, from + placeIn(p, host, k), length);
      }
      to += length;
    }
  }

  void receive(std::size_t k) {
    Step& now = step(k);
    std::uint8_t* segment = stream_ != nullptr ? stream_->acquire(now.out) : nullptr;
    for (const int host : links_->others()) {
      const std::size_t size = slices(host, here_, k);
      if (size == 0 || inFrame(host, here_)) continue;
      std::uint8_t* memory =
          segment != nullptr ? segment + placeOut(host, k) : arriving(host, k, size);
      now.receives.emplace_back(host, links_->receive(host, memory, size));
    }
  }

  void frames() {
    if (stream_ != nullptr) stream_->awaitArrivals();
    links_->sendFrames([&](int host) {
      std::uint8_t* frame = links_->frame(host);
      std::uint8_t* at = frame;
      if (isAllToAll()) {
        for (std::size_t p = 0; p < told_.size(); ++p) {
          for (const int peer : hosts_.ranks(host)) {
            const std::uint64_t sizes[] = {given(p, peer), expected(p, peer)};
            std::memcpy(at, sizes, sizeof sizes);
            at += sizeof sizes;
          }
        }
      }
      if (inFrame(here_, host)) {
        gather(host, 0, at);
        at += slices(here_, host, 0);
      }
      return static_cast<std::size_t>(at - frame);
    });
    links_->awaitFrames([this](int host) {
      if (request_.expectedCount.empty()) return request_.count;
      return request_.expectedCount[static_cast<std::size_t>(hosts_.leader(host))];
    });
    for (const int host : links_->others()) {
      if (isAllToAll()) compareSizes(host);
      (void)frameData(host);
    }
  }

  /// The slices in a host's frame.
  const std::uint8_t* frameData(int host) const {
    const std::size_t head = headBytes(host, here_);
    const std::size_t data = inFrame(host, here_) ? slices(host, here_, 0) : 0;
    return links_->frameOf(host, head + data) + head;
  }

  void compareSizes(int host) const {
    const std::size_t head = headBytes(host, here_);
    if (links_->frameBytes(host) < head) (void)links_->frameOf(host, head);
    const std::uint8_t* at = links_->frameOf(host, links_->frameBytes(host));
    for (const int peer : hosts_.ranks(host)) {
      for (std::size_t p = 0; p < told_.size(); ++p) {
        std::uint64_t sizes[2];  // sent to this host's rank, and expected of it
        std::memcpy(sizes, at, sizeof sizes);
        at += sizeof sizes;
        const int own = hosts_.local()[p];
        if (sizes[0] != expected(p, peer)) links_->disagree(peer, own, sizes[0], expected(p, peer));
        if (sizes[1] != given(p, peer)) links_->disagree(own, peer, given(p, peer), sizes[1]);
      }
    }
  }

  void handOut(std::size_t k) {
    Step& now = step(k);
    const std::uint8_t* segment = nullptr;
    if (hosts_.leads()) {
      settle(now.receives);
      if (stream_ != nullptr) {
        std::uint8_t* memory = stream_->acquire(now.out);
        for (const int host : links_->others()) {
          const std::size_t size = slices(host, here_, k);
          if (size == 0 || !inFrame(host, here_)) continue;
          std::memcpy(memory + placeOut(host, k), frameData(host), size);
        }
        stream_->publish(now.out);
        segment = memory;
      }
    } else {
      segment = stream_->await(0, now.out);
    }
    for (int host = 0; host < hosts_.count(); ++host) {
      const std::size_t size = host == here_ ? 0 : slices(host, here_, k);
      if (size == 0) continue;
      const std::uint8_t* from = segment != nullptr     ? segment + placeOut(host, k)
                                 : inFrame(host, here_) ? frameData(host)
                                                        : arriving(host, k, size);
      for (std::size_t p = 0; p < hosts_.ranks(host).size(); ++p) {
        take(host, p, k, from);
        from += sliceBytes(host, p, here_, k);
      }
    }
    if (stream_ != nullptr) stream_->consume(now.out);
  }

  /// Takes from a slice what is for this rank.
  void take(int host, std::size_t place, std::size_t k, const std::uint8_t* slice) const {
    const std::size_t start = k * slice_, length = sliceBytes(host, place, here_, k);
    const auto sender = static_cast<std::size_t>(hosts_.ranks(host)[place]);
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
        std::size_t at = place_ * message.bytes();  // in the parcel
        if (!scatter) {
          at = 0;
          for (std::size_t p = 0; p < place_; ++p) at += expected(p, static_cast<int>(sender));
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
  std::vector<Sizes> told_;  // all-to-all, of each rank here: bytes it gives and expects
  std::size_t slice_ = 1;    // most bytes of a parcel in a step
  Step steps_[kSlots];
  Transfers sends_[kSlots];
};

}  // namespace

void spanningExchange(Spanning& spanning, const Request& request) {
  SpanningExchange(spanning, request).run();
}

}  // namespace fastcoll
