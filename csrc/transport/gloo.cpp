#include "gloo.hpp"

#include <ATen/ATen.h>

#include <cstring>

#include "../algorithms/segment_reduce.hpp"

namespace fastcoll {
namespace {

// A collective begins with one all-gather of frames: the signature, and the message if it fits.
constexpr std::size_t kFrameBytes = 1024;
constexpr std::size_t kInlineBytes = kFrameBytes - sizeof(Arrival);

using Bytes = std::vector<std::uint8_t>;

class Exchange {
 public:
  Exchange(c10d::Backend& gloo, const Request& request, const std::string& prefix)
      : gloo_(gloo),
        request_(request),
        prefix_(prefix),
        ranks_(gloo.getSize()),
        me_(gloo.getRank()) {}

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
      throw Error(late ? ErrorKind::Timeout : ErrorKind::Backend,
                  concat(prefix_, late ? "Timed out after " : "the connection failed after ",
                         request_.timeout.count(),
                         " ms limit, over Gloo: ", text.substr(0, text.find('\n'))));
    }
  }

  at::Tensor view(void* data, std::size_t bytes) const {
    return at::from_blob(data, {static_cast<int64_t>(bytes)}, at::kByte);
  }

  /// all_gather of the same number of bytes from every rank.
  Bytes allGather(Bytes mine) {
    Bytes all(mine.size() * static_cast<std::size_t>(ranks_));
    at::Tensor in = view(mine.data(), mine.size());
    at::Tensor out = view(all.data(), all.size());
    wait([&] { return gloo_._allgather_base(out, in); });
    return all;
  }

  /// all_to_all of given numbers of bytes.
  Bytes allToAll(Bytes send, std::vector<int64_t> sendBytes, std::vector<int64_t> receiveBytes) {
    int64_t total = 0;
    for (const int64_t bytes : receiveBytes) total += bytes;
    Bytes receive(static_cast<std::size_t>(total));
    at::Tensor in = view(send.data(), send.size());
    at::Tensor out = view(receive.data(), receive.size());
    wait([&] { return gloo_.alltoall_base(out, in, receiveBytes, sendBytes); });
    return receive;
  }

  void arrive() {
    Arrival mine = request_.arrival();
    Bytes frame(kFrameBytes);
    std::memcpy(frame.data(), &mine, sizeof mine);
    const bool small =
        request_.collective == Collective::AllReduce && request_.in[0].bytes() <= kInlineBytes;
    if (small) request_.in[0].read(0, request_.in[0].bytes(), frame.data() + sizeof mine);
    frames_ = allGather(std::move(frame));
    for (int peer = 0; peer < ranks_; ++peer) {
      Arrival theirs;
      std::memcpy(&theirs, frames_.data() + kFrameBytes * static_cast<std::size_t>(peer),
                  sizeof theirs);
      const std::uint64_t expected = request_.expectedCount.empty()
                                         ? mine.count
                                         : request_.expectedCount[static_cast<std::size_t>(peer)];
      if (!agree(mine, theirs, expected)) {
        throw Error(
            ErrorKind::Backend,
            concat(prefix_, "Detected mismatch between collectives on ranks: rank ", me_, " runs ",
                   fastcoll::describe(mine), ", rank ", peer, " runs ", fastcoll::describe(theirs),
                   ". All ranks must issue the same collectives in the same order."));
      }
    }
  }

  void broadcast() {
    const bool root = me_ == request_.root;
    const Message& message = root ? request_.in[0] : request_.out[0];
    Bytes flat(message.bytes());
    if (root) message.read(0, flat.size(), flat.data());
    std::vector<at::Tensor> tensors{view(flat.data(), flat.size())};
    c10d::BroadcastOptions options;
    options.rootRank = request_.root;
    wait([&] { return gloo_.broadcast(tensors, options); });
    if (!root) message.write(0, flat.size(), flat.data());
  }

  void allReduce() {
    const std::size_t bytes = request_.in[0].bytes();
    if (bytes == 0) return;
    if (bytes <= kInlineBytes) {
      const Bytes result = reduceSlices(frames_, sizeof(Arrival), kFrameBytes, bytes);
      request_.out[0].write(0, bytes, result.data());
      return;
    }
    // Reduce-scatter by all-to-all and local sums, then all-gather of equal (padded) pieces.
    const std::size_t element = elementSize(request_.dtype);
    const std::size_t count = bytes / element;
    Bytes flat(bytes);
    request_.in[0].read(0, bytes, flat.data());
    std::vector<int64_t> sendBytes;
    for (int peer = 0; peer < ranks_; ++peer) {
      sendBytes.push_back(static_cast<int64_t>(pieceOf(count, ranks_, peer).count * element));
    }
    const std::size_t mine = pieceOf(count, ranks_, me_).count * element;
    const std::size_t most = pieceOf(count, ranks_, 0).count * element;
    const Bytes pieces = allToAll(
        std::move(flat), sendBytes,
        std::vector<int64_t>(static_cast<std::size_t>(ranks_), static_cast<int64_t>(mine)));
    Bytes reduced = reduceSlices(pieces, 0, mine, mine);
    reduced.resize(most);
    const Bytes all = allGather(std::move(reduced));
    for (int peer = 0; peer < ranks_; ++peer) {
      const Piece piece = pieceOf(count, ranks_, peer);
      request_.out[0].write(piece.start * element, piece.count * element,
                            all.data() + most * static_cast<std::size_t>(peer));
    }
  }

  /// Reduces `bytes` of every rank's slice, `stride` apart, in rank order.
  Bytes reduceSlices(const Bytes& slices, std::size_t offset, std::size_t stride,
                     std::size_t bytes) {
    Bytes result(bytes);
    if (bytes == 0) return result;
    SegmentReducer reducer(request_, ranks_);
    for (int peer = 0; peer < ranks_; ++peer) {
      reducer.source(peer, slices.data() + offset + stride * static_cast<std::size_t>(peer));
    }
    reducer.run(result.data(), bytes / elementSize(request_.dtype));
    return result;
  }

  void reduce() {
    const std::size_t bytes = request_.in[0].bytes();
    Bytes flat(bytes);
    request_.in[0].read(0, bytes, flat.data());
    std::vector<int64_t> sendBytes(static_cast<std::size_t>(ranks_), 0);
    sendBytes[static_cast<std::size_t>(request_.root)] = static_cast<int64_t>(bytes);
    const bool root = me_ == request_.root;
    const Bytes all = allToAll(std::move(flat), sendBytes,
                               std::vector<int64_t>(static_cast<std::size_t>(ranks_),
                                                    root ? static_cast<int64_t>(bytes) : 0));
    if (!root) return;
    const Bytes result = reduceSlices(all, 0, bytes, bytes);
    request_.out[0].write(0, bytes, result.data());
  }

  void reduceScatter() {
    const std::size_t bytes = request_.out[0].bytes();
    const Bytes all = routeBytes(
        std::vector<int64_t>(static_cast<std::size_t>(ranks_), static_cast<int64_t>(bytes)));
    const Bytes result = reduceSlices(all, 0, bytes, bytes);
    request_.out[0].write(0, bytes, result.data());
  }

  /// Sends in[j] to rank j.
  Bytes routeBytes(const std::vector<int64_t>& receiveBytes) {
    Bytes flat;
    std::vector<int64_t> sendBytes;
    for (const Message& message : request_.in) {
      const std::size_t start = flat.size();
      flat.resize(start + message.bytes());
      message.read(0, message.bytes(), flat.data() + start);
      sendBytes.push_back(static_cast<int64_t>(message.bytes()));
    }
    sendBytes.resize(static_cast<std::size_t>(ranks_), 0);
    return allToAll(std::move(flat), sendBytes, receiveBytes);
  }

  // all_gather, gather, scatter and all_to_all: every rank sends known bytes to known ranks.
  void route() {
    const auto ranks = static_cast<std::size_t>(ranks_);
    std::vector<Message> send(ranks);
    std::vector<Message> receive(ranks);
    if (request_.collective == Collective::AllGather) {
      std::fill(send.begin(), send.end(), request_.in[0]);
      receive = request_.out;
    } else if (request_.collective == Collective::Gather) {
      send[static_cast<std::size_t>(request_.root)] = request_.in[0];
      if (me_ == request_.root) receive = request_.out;
    } else if (request_.collective == Collective::Scatter) {
      if (me_ == request_.root) send = request_.in;
      receive[static_cast<std::size_t>(request_.root)] = request_.out[0];
    } else {
      send = request_.in;
      receive = request_.out;
      compareSplits(send, receive);
    }
    Bytes flat;
    std::vector<int64_t> sendBytes;
    std::vector<int64_t> receiveBytes;
    for (const Message& message : send) {
      const std::size_t start = flat.size();
      flat.resize(start + message.bytes());
      message.read(0, message.bytes(), flat.data() + start);
      sendBytes.push_back(static_cast<int64_t>(message.bytes()));
    }
    for (const Message& message : receive) {
      receiveBytes.push_back(static_cast<int64_t>(message.bytes()));
    }
    const Bytes got = allToAll(std::move(flat), sendBytes, receiveBytes);
    std::size_t start = 0;
    for (const Message& message : receive) {
      message.write(0, message.bytes(), got.data() + start);
      start += message.bytes();
    }
  }

  // Gloo aborts the process where the two ends of a pair disagree, so they are compared first.
  void compareSplits(const std::vector<Message>& send, const std::vector<Message>& receive) {
    Bytes mine(sizeof(std::uint64_t) * send.size());
    for (std::size_t i = 0; i < send.size(); ++i) {
      const std::uint64_t bytes = send[i].bytes();
      std::memcpy(mine.data() + i * sizeof bytes, &bytes, sizeof bytes);
    }
    const Bytes all = allGather(std::move(mine));
    for (std::size_t from = 0; from < receive.size(); ++from) {
      for (std::size_t to = 0; to < receive.size(); ++to) {
        std::uint64_t bytes = 0;
        std::memcpy(&bytes, all.data() + (from * receive.size() + to) * sizeof bytes, sizeof bytes);
        if (to == static_cast<std::size_t>(me_) && bytes != receive[from].bytes()) {
          throw Error(ErrorKind::Backend,
                      concat(prefix_, "Detected mismatch between collectives on ranks: rank ", me_,
                             " expects ", receive[from].bytes(), " bytes from rank ", from,
                             ", which sends ", bytes, ". Match input and output splits."));
        }
      }
    }
  }

  c10d::Backend& gloo_;
  const Request& request_;
  const std::string& prefix_;
  const int ranks_;
  const int me_;
  Bytes frames_;
};

}  // namespace

void GlooTransport::run(const Request& request, const std::string& prefix) {
  Exchange(*gloo_, request, prefix).run();
}

void GlooTransport::abort() noexcept {
  try {
    gloo_->abort();
  } catch (const std::exception& error) {
    log(LogLevel::Warn, concat("Gloo could not be aborted: ", error.what()));
  }
}

}  // namespace fastcoll
