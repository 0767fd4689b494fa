// All-to-all: every rank publishes, per segment, a piece for each peer; each peer copies its own.
//
// Messages may differ for every pair, and no rank has the others' sizes. So all ranks first
// announce the bytes of each pair, and compare what both ends of every pair announced. Then all of
// them cut by the longest message. If the messages of all ranks fit into the announcement's
// segment, they travel with it. Otherwise a rank fills its first segment before all announcements
// arrive. It assumes that its own longest message is the longest of all, because usually all are
// equal.
//
// Two ranks exchange their messages in place if these have at least 8 KiB and fit into caches
// (exchange.hpp).
//
// Steps: 1 for the announcement, and 1 per segment. Bytes read per rank: those that it receives.
#include <optional>

#include "cpu/algorithms/direct.hpp"
#include "cpu/algorithms/exchange.hpp"

namespace fastcoll {
namespace {

/// Every rank compares every pair, so a mismatch between two ranks is an error on all.
void comparePairs(SegmentStream& stream, const Signature& signature) {
  for (int from = 0; from < stream.size(); ++from) {
    for (int to = 0; to < stream.size(); ++to) {
      const std::uint64_t sent = stream.splitOf(from, to);
      const std::uint64_t expected = stream.expectedBy(to, from);
      if (sent == expected) continue;
      stream.fail(ErrorKind::Backend, splitMismatch(signature, stream.memberOf(from),
                                                    stream.memberOf(to), sent, expected));
    }
  }
}

/// Reads the pieces for this rank from one segment of each peer.
void readPieces(SegmentStream& stream, const Request& request, const Strided& strided,
                std::size_t s, const Segment& segment, bool streaming) {
  for (const int peer : stream.others()) {
    const Message& out = request.out[peer];
    const std::uint8_t* memory = stream.await(peer, segment);
    out.write(strided.cut.offset(s), strided.cut.length(s, out.bytes()),
              memory + strided.place(peer, stream.rank()), streaming);
  }
}

/// Reads the peers' messages in shared memory, where each rank's messages are one run.
void readDirect(SegmentStream& stream, const Request& request, bool streaming) {
  for (const int peer : stream.others()) {
    std::size_t before = 0;
    std::size_t total = 0;
    for (int to = 0; to < stream.size(); ++to) {
      if (to < stream.rank()) before += stream.splitOf(peer, to);
      total += stream.splitOf(peer, to);
    }
    const Message& out = request.out[peer];
    out.write(0, out.bytes(), stream.directOf(peer, total) + before, streaming);
  }
}

}  // namespace

void allToAll(SegmentStream& stream, const Request& request, const TuningTable& tuning) {
  const int ranks = stream.size();
  const std::size_t mine = stream.rank();
  std::vector<std::uint64_t> splits;
  std::size_t longest = 0;
  std::size_t received = 0;
  for (std::size_t to = 0; to < request.in.size(); ++to) {
    splits.push_back(request.in[to].bytes());
    if (to != mine) longest = std::max(longest, request.in[to].bytes());
  }
  for (const Message& out : request.out) {
    splits.push_back(out.bytes());
    received += out.bytes();
  }
  const bool streaming = received >= tuning.streamingBytes;
  constexpr std::size_t kFirst = ControlBlock::kSmallSegmentBytes;
  const auto fitsFirst = [ranks](std::size_t bytes) {
    return Strided(bytes, ranks, kFirst).cut.segments == 1 &&
           Strided(bytes, ranks, kFirst).bytes() <= kFirst;
  };

  const Offer offer{longest, longest >= tuning.directBytes ? directOffset(stream, request.in) : 0};
  stream.begin(request, request.expectedCount, offer, splits.data(), request.deadline,
               request.timeout);
  const Segment first = stream.reserve(kFirst);
  if (fitsFirst(longest)) {
    stream.fill(first, [&](std::uint8_t* memory, bool streams) {
      return Strided(longest, ranks, kFirst).write(0, stream.rank(), request.in, memory, streams);
    });
  }
  stream.publish(first);
  const auto cutBy = [&](std::size_t bytes) {
    return Strided(bytes, ranks, segmentLimit(stream, tuning, bytes));
  };
  const auto fillBy = [&](const Strided& strided, std::size_t s, std::uint8_t* memory,
                          bool streams) {
    return strided.write(s, stream.rank(), request.in, memory, streams);
  };
  const std::size_t next = (mine + 1) % request.in.size();  // the only peer if two ranks
  const auto exchangeOf = [&](std::size_t bytes) {
    return Exchange(stream, tuning, request.in[next], request.out[next].bytes(), bytes);
  };
  std::optional<Segment> guessed;
  if (offer.direct == 0 && !fitsFirst(longest)) {
    if (Exchange::serves(stream, tuning, longest)) {
      guessed = exchangeOf(longest).fill(0);
    } else {
      const Strided strided = cutBy(longest);
      guessed = stream.reserve(strided.bytes());
      stream.fill(*guessed, [&](std::uint8_t* memory, bool streams) {
        return fillBy(strided, 0, memory, streams);
      });
    }
  }
  stream.awaitArrivals();
  comparePairs(stream, request);

  bool direct = offer.direct != 0;
  bool alike = true;
  std::size_t longestOfAll = longest;
  for (const int peer : stream.others()) {
    if (stream.splitOf(peer, stream.rank()) > stream.offerOf(peer).longest) {
      stream.fail(ErrorKind::Backend, concat(stream.memberName(peer),
                                             " announces a longest message "
                                             "that is shorter than the one for rank ",
                                             stream.memberOf(stream.rank())));
    }
    longestOfAll = std::max<std::size_t>(longestOfAll, stream.offerOf(peer).longest);
    alike = alike && stream.offerOf(peer).longest == longest;
    direct = direct && stream.offerOf(peer).direct != 0;
  }
  if (guessed && !alike) {
    stream.releaseAfter(first);
    guessed.reset();
  }
  if (direct) {
    readDirect(stream, request, streaming);
    stream.consume(first);
  } else if (fitsFirst(longestOfAll)) {
    for (const int peer : stream.others()) {
      const Message& out = request.out[peer];
      const Strided theirs(stream.offerOf(peer).longest, ranks, kFirst);
      out.write(0, out.bytes(), stream.await(peer, first) + theirs.place(peer, stream.rank()));
    }
    stream.consume(first);
  } else if (Exchange::serves(stream, tuning, longestOfAll)) {
    const auto take = [&](std::size_t offset, std::size_t bytes, const std::uint8_t* memory) {
      request.out[next].write(offset, bytes, memory, streaming);
    };
    exchangeOf(longestOfAll).run(take, true, guessed ? &*guessed : nullptr);
  } else {
    const Strided strided = cutBy(longestOfAll);
    pipelineSegments(
        stream, strided.cut.segments, [&](std::size_t) { return strided.bytes(); },
        [&](std::size_t s, std::uint8_t* memory, bool streams) {
          return fillBy(strided, s, memory, streams);
        },
        [&](std::size_t s, const Segment& segment) {
          readPieces(stream, request, strided, s, segment, streaming);
        },
        guessed ? &*guessed : nullptr);
  }
  // comparePairs() has checked that its own message fits its own output.
  request.in[mine].copyTo(request.out[mine], streaming);
  if (direct) stream.awaitConsumed(first);
  stream.end();
}

}  // namespace fastcoll
