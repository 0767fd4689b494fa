#include "gloo.hpp"

#include <ATen/ATen.h>

#include <algorithm>
#include <cstring>
#include <numeric>
#include <system_error>
#include <thread>
#include <utility>

#include "../algorithms/segment_reduce.hpp"
#include "../base/interrupt.hpp"
#include "../base/thread.hpp"

namespace fastcoll {
namespace {

// A collective begins with one all-gather of frames: the signature, and the message if it fits.
constexpr std::size_t kFrameBytes = 1024;
constexpr std::size_t kInlineBytes = kFrameBytes - sizeof(Arrival);
// Larger messages travel in chunks of this many bytes per rank, so that scratch memory stays
// bounded.
constexpr std::size_t kChunkBytes = std::size_t{4} << 20;

// How often a transfer that waits asks whether the group has failed elsewhere.
constexpr Milliseconds kAsk{250};

using Counts = std::vector<int64_t>;

at::Tensor view(const void* data, std::size_t bytes) {
  return at::from_blob(const_cast<void*>(data), {static_cast<int64_t>(bytes)}, at::kByte);
}

class Exchange {
 public:
  Exchange(c10d::Backend& gloo, const Request& request, const std::string& prefix,
           GlooBuffers& buffers, const std::atomic<bool>& aborted,
           const std::function<void(const std::string&)>& checkPeers)
      : gloo_(gloo),
        request_(request),
        prefix_(prefix),
        ranks_(static_cast<std::size_t>(gloo.getSize())),
        me_(static_cast<std::size_t>(gloo.getRank())),
        element_(elementSize(request.dtype)),
        send_(buffers.send),
        receive_(buffers.receive),
        result_(buffers.result),
        frames_(buffers.frames.get(kFrameBytes * (ranks_ + 1))),
        aborted_(aborted),
        checkPeers_(checkPeers) {}

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
    c10::intrusive_ptr<c10d::Work> work;
    try {
      work = start();
      auto asked = Clock::now();
      while (!finished(*work)) {
        checkInterrupt();
        if (Clock::now() - asked > kAsk) {
          checkPeers_(prefix_);
          asked = Clock::now();
        }
        if (aborted_.load(std::memory_order_acquire)) {
          throw Error(ErrorKind::Backend, prefix_ + "the group was aborted or destroyed");
        }
        if (Clock::now() >= request_.deadline) {
          throw Error(
              ErrorKind::Timeout,
              concat(prefix_, "Timed out after ", request_.timeout.count(), " ms over Gloo in ",
                     fastcoll::describe(request_.arrival()), " on rank ", me_));
        }
      }
      work->wait();  // throws what it ended with
    } catch (const Error&) {
      throw;
    } catch (const c10::Error& error) {
      failed(error.what_without_backtrace());
    } catch (const std::runtime_error& error) {
      failed(error.what());
    }
  }

  [[noreturn]] void failed(const std::string& text) const {
    const bool late = text.find("imed out") != std::string::npos;
    const std::string said =
        concat(prefix_, late ? "Timed out" : "the connection failed", " on rank ", me_,
               " over Gloo (limit ", request_.timeout.count(), " ms) in ",
               fastcoll::describe(request_.arrival()), ": ", text.substr(0, text.find('\n')));
    if (late) throw Error(ErrorKind::Timeout, said);
    throw ConnectionLost(ErrorKind::Backend, said);
  }

  /// Polls: quickly at first, then with sleeps of up to a millisecond. Gloo's own wait cannot be
  /// interrupted, and its wait with a time limit throws at each one.
  bool finished(c10d::Work& work) {
    for (int spin = 0; spin < 200; ++spin) {
      if (work.isCompleted()) return true;
      std::this_thread::yield();
    }
    for (int nap = 0; nap < 40; ++nap) {
      std::this_thread::sleep_for(std::chrono::microseconds(std::min(50 << nap / 4, 1000)));
      if (work.isCompleted()) return true;
    }
    return false;
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
    std::uint8_t* frame = frames_ + kFrameBytes * ranks_;
    std::memset(frame, 0, kFrameBytes);
    std::memcpy(frame, &mine, sizeof mine);
    const bool small =
        request_.collective == Collective::AllReduce && request_.in[0].bytes() <= kInlineBytes;
    if (small) request_.in[0].read(0, request_.in[0].bytes(), frame + sizeof mine);
    allGather(frame, kFrameBytes, frames_);
    for (std::size_t peer = 0; peer < ranks_; ++peer) {
      Arrival theirs;
      std::memcpy(&theirs, frames_ + kFrameBytes * peer, sizeof theirs);
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

  /// Reduces `bytes` of every rank, `stride` apart from `slices` on.
  void reduceSlices(const std::uint8_t* slices, std::size_t stride, std::size_t bytes,
                    std::uint8_t* out) {
    SegmentReducer reducer(request_, static_cast<int>(ranks_));
    sumSlices(reducer, slices, stride, bytes, out);
  }
  void sumSlices(SegmentReducer& reducer, const std::uint8_t* slices, std::size_t stride,
                 std::size_t bytes, std::uint8_t* out) {
    for (std::size_t peer = 0; peer < ranks_; ++peer) {
      reducer.source(static_cast<int>(peer), slices + stride * peer);
    }
    if (bytes > 0) reducer.run(out, bytes);
  }

  // Reduce-scatter by all-to-all and local sums, then all-gather of equal (padded) pieces.
  void allReduce() {
    const Message& in = request_.in[0];
    const Message& out = request_.out[0];
    const std::size_t bytes = in.bytes();
    if (bytes <= kInlineBytes) {
      std::uint8_t* result = result_.get(std::max<std::size_t>(bytes, 1));
      SegmentReducer reducer(request_, static_cast<int>(ranks_));
      reducer.measureNothing();  // everybody reduces all
      sumSlices(reducer, frames_ + sizeof(Arrival), kFrameBytes, bytes, result);
      reducer.measureShare(request_, result, bytes, static_cast<int>(me_));
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
    const std::size_t bytes = request_.in[me_].bytes();
    const std::size_t widening = request_.out[0].bytes() / std::max<std::size_t>(bytes, 1);
    for (std::size_t start = 0; start < bytes; start += kChunkBytes) {
      const std::size_t length = std::min(kChunkBytes, bytes - start);
      const Counts each(ranks_, static_cast<int64_t>(length));
      std::uint8_t* send = send_.get(length * ranks_);
      for (std::size_t peer = 0; peer < ranks_; ++peer) {
        request_.in[peer].read(start, length, send + length * peer);
      }
      std::uint8_t* pieces = receive_.get(length * ranks_);
      allToAll(send, each, pieces, each);
      std::uint8_t* result = result_.get(length * widening);
      reduceSlices(pieces, length, length, result);
      request_.out[0].write(start * widening, length * widening, result);
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
    const std::size_t row = 2 * ranks_;
    auto* all =
        reinterpret_cast<std::uint64_t*>(receive_.get(row * (ranks_ + 1) * sizeof(std::uint64_t)));
    std::uint64_t* mine = all + row * ranks_;
    for (std::size_t peer = 0; peer < ranks_; ++peer) {
      mine[peer] = send[peer].bytes();
      mine[ranks_ + peer] = receive[peer].bytes();
    }
    allGather(mine, row * sizeof(std::uint64_t), all);
    for (std::size_t from = 0; from < ranks_; ++from) {
      for (std::size_t to = 0; to < ranks_; ++to) {
        const std::uint64_t sent = all[row * from + to];
        const std::uint64_t expected = all[row * to + ranks_ + from];
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
  std::uint8_t* const frames_;  // one per rank, then this rank's own
  const std::atomic<bool>& aborted_;
  const std::function<void(const std::string&)>& checkPeers_;
};

}  // namespace

GlooTransport::~GlooTransport() {
  if (abandoned_.empty()) return;
  // Gloo's destructor waits for its threads, which end with the timeout of what they are in.
  try {
    startThread([gloo = std::move(gloo_), memory = std::move(abandoned_)]() mutable {
      gloo.reset();
      memory.clear();
    }).detach();
  } catch (const std::system_error& error) {
    log(LogLevel::Warn, concat("Gloo is ended while the caller waits: ", error.what()));
  }
}

void GlooTransport::run(const Request& request, const std::shared_ptr<void>& owner,
                        const std::string& prefix) {
  try {
    Exchange(*gloo_, request, prefix, *buffers_, aborted_, checkPeers).run();
  } catch (...) {
    abandoned_.push_back(std::exchange(buffers_, std::make_shared<GlooBuffers>()));
    abandoned_.push_back(owner);
    throw;
  }
}

}  // namespace fastcoll
