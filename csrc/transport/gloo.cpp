#include "gloo.hpp"

#include <ATen/ATen.h>

#include <algorithm>
#include <cstring>
#include <numeric>

#include "../algorithms/segment_reduce.hpp"

namespace fastcoll {
namespace {

// A collective begins with one all-gather of frames: the signature, and the message if it fits.
constexpr std::size_t kFrameBytes = 1024;
constexpr std::size_t kInlineBytes = kFrameBytes - sizeof(Arrival);
// Larger messages travel in chunks of this many bytes per rank, so that scratch memory stays
// bounded.
constexpr std::size_t kChunkBytes = std::size_t{4} << 20;

using Counts = std::vector<int64_t>;

at::Tensor view(const void* data, std::size_t bytes) {
  return at::from_blob(const_cast<void*>(data), {static_cast<int64_t>(bytes)}, at::kByte);
}

class Exchange {
 public:
  Exchange(c10d::Backend& gloo, const Request& request, const std::string& prefix, Scratch& send,
           Scratch& receive, Scratch& result)
      : gloo_(gloo),
        request_(request),
        prefix_(prefix),
        ranks_(static_cast<std::size_t>(gloo.getSize())),
        me_(static_cast<std::size_t>(gloo.getRank())),
        element_(elementSize(request.dtype)),
        send_(send),
        receive_(receive),
        result_(result) {}

  void run() {
    arrive();
    switch (request_.collective) {
      case Collective::Barrier:
        return;
      case Collective::Broadcast:
        return broadcast();
      case Collective::AllReduce:
        return allReduce();
      case Collective::Reduce:
        return reduce();
      case Collective::ReduceScatter:
        return reduceScatter();
      default:
        return route();
    }
  }

 private:
  template <typename Start>
  void wait(Start start) {
    const auto left = std::chrono::duration_cast<Milliseconds>(request_.deadline - Clock::now());
    try {
      start()->wait(std::max(left, Milliseconds(1)));
    } catch (const std::exception& error) {
      const std::string text = error.what();
      const bool late = text.find("imed out") != std::string::npos;
      throw Error(
          late ? ErrorKind::Timeout : ErrorKind::Backend,
          concat(prefix_, late ? "Timed out" : "the connection failed", " over Gloo (limit ",
                 request_.timeout.count(), " ms): ", text.substr(0, text.find('\n'))));
    }
  }

  [[noreturn]] void mismatch(const std::string& text) const {
    throw Error(ErrorKind::Backend,
                prefix_ + "Detected mismatch between collectives on ranks: " + text);
  }

  void allGather(const void* mine, std::size_t bytes, void* all) {
    at::Tensor in = view(mine, bytes);
    at::Tensor out = view(all, bytes * ranks_);
    wait([&] { return gloo_._allgather_base(out, in); });
  }

  void allToAll(const void* send, Counts sendBytes, void* receive, Counts receiveBytes) {
    const auto sum = [](const Counts& counts) {
      return static_cast<std::size_t>(std::accumulate(counts.begin(), counts.end(), int64_t{0}));
    };
    at::Tensor in = view(send, sum(sendBytes));
    at::Tensor out = view(receive, sum(receiveBytes));
    wait([&] { return gloo_.alltoall_base(out, in, receiveBytes, sendBytes); });
  }

  /// The bytes of a message in one run: where they lie, or a copy in `scratch`.
  const std::uint8_t* flat(const Message& message, std::size_t offset, std::size_t bytes,
                           Scratch& scratch) const {
    if (const auto* direct = message.contiguous(offset, bytes)) return direct;
    std::uint8_t* copy = scratch.get(bytes);
    message.read(offset, bytes, copy);
    return copy;
  }

  void arrive() {
    const Arrival mine = request_.arrival();
    std::uint8_t frame[kFrameBytes] = {};
    std::memcpy(frame, &mine, sizeof mine);
    const bool small =
        request_.collective == Collective::AllReduce && request_.in[0].bytes() <= kInlineBytes;
    if (small) request_.in[0].read(0, request_.in[0].bytes(), frame + sizeof mine);
    frames_.resize(kFrameBytes * ranks_);
    allGather(frame, kFrameBytes, frames_.data());
    for (std::size_t peer = 0; peer < ranks_; ++peer) {
      Arrival theirs;
      std::memcpy(&theirs, frames_.data() + kFrameBytes * peer, sizeof theirs);
      const std::uint64_t expected =
          request_.expectedCount.empty() ? mine.count : request_.expectedCount[peer];
      if (!agree(mine, theirs, expected)) {
        mismatch(concat("rank ", me_, " runs ", fastcoll::describe(mine), ", rank ", peer, " runs ",
                        fastcoll::describe(theirs),
                        ". All ranks must issue the same collectives in the same order."));
      }
    }
  }

  void broadcast() {
    const bool root = static_cast<int>(me_) == request_.root;
    const Message& message = root ? request_.in[0] : request_.out[0];
    const std::size_t bytes = message.bytes();
    const auto* direct = message.contiguous(0, bytes);
    std::uint8_t* copy = direct == nullptr ? send_.get(bytes) : nullptr;
    if (copy != nullptr && root) message.read(0, bytes, copy);
    std::vector<at::Tensor> tensors{view(copy != nullptr ? copy : direct, bytes)};
    c10d::BroadcastOptions options;
    options.rootRank = request_.root;
    wait([&] { return gloo_.broadcast(tensors, options); });
    if (copy != nullptr && !root) message.write(0, bytes, copy);
  }

  /// Reduces `bytes` of every rank, `stride` apart from `slices` on, in rank order.
  void reduceSlices(const std::uint8_t* slices, std::size_t stride, std::size_t bytes, void* out) {
    SegmentReducer reducer(request_, static_cast<int>(ranks_));
    for (std::size_t peer = 0; peer < ranks_; ++peer) {
      reducer.source(static_cast<int>(peer), slices + stride * peer);
    }
    if (bytes > 0) reducer.run(out, bytes / element_);
  }

  // Reduce-scatter by all-to-all and local sums, then all-gather of equal (padded) pieces.
  void allReduce() {
    const Message& in = request_.in[0];
    const Message& out = request_.out[0];
    const std::size_t bytes = in.bytes();
    if (bytes <= kInlineBytes) {
      std::uint8_t* result = result_.get(std::max<std::size_t>(bytes, 1));
      reduceSlices(frames_.data() + sizeof(Arrival), kFrameBytes, bytes, result);
      return out.write(0, bytes, result);
    }
    const std::size_t chunk = kChunkBytes * ranks_;  // whole chunks have equal pieces
    for (std::size_t start = 0; start < bytes; start += chunk) {
      const std::size_t length = std::min(chunk, bytes - start);
      const std::size_t count = length / element_;
      const auto pieceBytes = [&](std::size_t peer) {
        return pieceOf(count, static_cast<int>(ranks_), static_cast<int>(peer)).count * element_;
      };
      Counts sendBytes;
      for (std::size_t peer = 0; peer < ranks_; ++peer) {
        sendBytes.push_back(static_cast<int64_t>(pieceBytes(peer)));
      }
      const std::size_t mine = pieceBytes(me_);
      const std::size_t most = pieceBytes(0);
      std::uint8_t* pieces = receive_.get(std::max(mine, most) * ranks_);
      allToAll(flat(in, start, length, send_), sendBytes, pieces,
               Counts(ranks_, static_cast<int64_t>(mine)));
      std::uint8_t* reduced = result_.get(most);
      reduceSlices(pieces, mine, mine, reduced);
      std::uint8_t* direct = most * ranks_ == length ? out.contiguous(start, length) : nullptr;
      allGather(reduced, most, direct != nullptr ? direct : pieces);
      for (std::size_t peer = 0; direct == nullptr && peer < ranks_; ++peer) {
        const Piece piece = pieceOf(count, static_cast<int>(ranks_), static_cast<int>(peer));
        out.write(start + piece.start * element_, piece.count * element_, pieces + most * peer);
      }
    }
  }

  void reduce() {
    const std::size_t bytes = request_.in[0].bytes();
    const bool root = static_cast<int>(me_) == request_.root;
    for (std::size_t start = 0; start < bytes; start += kChunkBytes) {
      const std::size_t length = std::min(kChunkBytes, bytes - start);
      Counts sendBytes(ranks_, 0);
      sendBytes[static_cast<std::size_t>(request_.root)] = static_cast<int64_t>(length);
      std::uint8_t* pieces = receive_.get(root ? length * ranks_ : 1);
      allToAll(flat(request_.in[0], start, length, send_), sendBytes, pieces,
               Counts(ranks_, root ? static_cast<int64_t>(length) : 0));
      if (!root) continue;
      std::uint8_t* result = result_.get(length);
      reduceSlices(pieces, length, length, result);
      request_.out[0].write(start, length, result);
    }
  }

  void reduceScatter() {
    const std::size_t bytes = request_.out[0].bytes();
    for (std::size_t start = 0; start < bytes; start += kChunkBytes) {
      const std::size_t length = std::min(kChunkBytes, bytes - start);
      const Counts each(ranks_, static_cast<int64_t>(length));
      std::uint8_t* send = send_.get(length * ranks_);
      for (std::size_t peer = 0; peer < ranks_; ++peer) {
        request_.in[peer].read(start, length, send + length * peer);
      }
      std::uint8_t* pieces = receive_.get(length * ranks_);
      allToAll(send, each, pieces, each);
      std::uint8_t* result = result_.get(length);
      reduceSlices(pieces, length, length, result);
      request_.out[0].write(start, length, result);
    }
  }

  // all_gather, gather, scatter and all_to_all: every rank sends known bytes to known ranks.
  void route() {
    std::vector<Message> send(ranks_);
    std::vector<Message> receive(ranks_);
    if (request_.collective == Collective::AllGather) {
      std::fill(send.begin(), send.end(), request_.in[0]);
      receive = request_.out;
    } else if (request_.collective == Collective::Gather) {
      send[static_cast<std::size_t>(request_.root)] = request_.in[0];
      if (static_cast<int>(me_) == request_.root) receive = request_.out;
    } else if (request_.collective == Collective::Scatter) {
      if (static_cast<int>(me_) == request_.root) send = request_.in;
      receive[static_cast<std::size_t>(request_.root)] = request_.out[0];
    } else {
      send = request_.in;
      receive = request_.out;
      compareSplits(send, receive);
    }
    // The longest message anywhere is not known here, so all go at once.
    Counts sendBytes;
    Counts receiveBytes;
    std::size_t out = 0;
    std::size_t in = 0;
    for (std::size_t peer = 0; peer < ranks_; ++peer) {
      sendBytes.push_back(static_cast<int64_t>(send[peer].bytes()));
      receiveBytes.push_back(static_cast<int64_t>(receive[peer].bytes()));
      out += send[peer].bytes();
      in += receive[peer].bytes();
    }
    std::uint8_t* flatOut = send_.get(std::max<std::size_t>(out, 1));
    std::uint8_t* flatIn = receive_.get(std::max<std::size_t>(in, 1));
    std::size_t at = 0;
    for (const Message& message : send) {
      message.read(0, message.bytes(), flatOut + at);
      at += message.bytes();
    }
    allToAll(flatOut, sendBytes, flatIn, receiveBytes);
    at = 0;
    for (const Message& message : receive) {
      message.write(0, message.bytes(), flatIn + at);
      at += message.bytes();
    }
  }

  // Gloo aborts the process where the two ends of a pair disagree, so they are compared first.
  void compareSplits(const std::vector<Message>& send, const std::vector<Message>& receive) {
    // Every rank sees every pair, so that all of them fail together.
    std::vector<std::uint64_t> mine;
    for (const Message& message : send) mine.push_back(message.bytes());
    for (const Message& message : receive) mine.push_back(message.bytes());
    std::vector<std::uint64_t> all(2 * ranks_ * ranks_);
    allGather(mine.data(), 2 * ranks_ * sizeof(std::uint64_t), all.data());
    for (std::size_t from = 0; from < ranks_; ++from) {
      for (std::size_t to = 0; to < ranks_; ++to) {
        const std::uint64_t sent = all[2 * ranks_ * from + to];
        const std::uint64_t expected = all[2 * ranks_ * to + ranks_ + from];
        if (sent != expected) {
          mismatch(concat("rank ", to, " expects ", expected, " bytes from rank ", from,
                          ", which sends ", sent, ". Match input and output splits."));
        }
      }
    }
  }

  c10d::Backend& gloo_;
  const Request& request_;
  const std::string& prefix_;
  const std::size_t ranks_;
  const std::size_t me_;
  const std::size_t element_;
  Scratch& send_;
  Scratch& receive_;
  Scratch& result_;
  std::vector<std::uint8_t> frames_;
};

}  // namespace

void GlooTransport::run(const Request& request, const std::string& prefix) {
  Exchange(*gloo_, request, prefix, send_, receive_, result_).run();
}

void GlooTransport::abort() noexcept {
  try {
    gloo_->abort();
  } catch (const std::exception& error) {
    log(LogLevel::Warn, concat("Gloo could not be aborted: ", error.what()));
  }
}

}  // namespace fastcoll
