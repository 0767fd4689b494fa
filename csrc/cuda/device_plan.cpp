#include "cuda/device_plan.hpp"

#include "base/error.hpp"

namespace fastcoll {
namespace {

using Spans = std::vector<Span>;

class Planner {
 public:
  Planner(const Request& request, int rank, std::vector<DeviceRequest>& into)
      : request_(request), rank_(rank), size_(elementSize(request.dtype)), into_(into) {}

  void add(Collective collective, int root, const Span* in, const Span* out) {
    DeviceRequest one;
    one.collective = collective;
    one.dtype = request_.dtype;
    one.op = request_.op;
    one.factor = request_.factor;
    one.factorOnDevice = reinterpret_cast<std::uintptr_t>(request_.factorOnDevice);
    one.root = root;
    if (in != nullptr) one.in = spanOf(*in);
    if (out != nullptr) one.out = spanOf(*out);
    into_.push_back(one);
  }

  /// Adds one operation for each piece of the message. `in` and `out` are cut alike.
  void pieces(Collective collective, const Message* in, const Message* out) {
    const Spans from = in != nullptr ? in->spans() : Spans();
    const Spans to = out != nullptr ? out->spans() : Spans();
    for (std::size_t i = 0; i < std::max(from.size(), to.size()); ++i) {
      add(collective, request_.root, in != nullptr ? &from[i] : nullptr,
          out != nullptr ? &to[i] : nullptr);
    }
  }

  /// Adds the pieces of all ranks: one `whole` if they are consecutive in memory, else a `part` for
  /// each rank.
  void allRanks(const Message& own, const std::vector<Message>& ranks, Collective whole,
                Collective part) {
    std::vector<Spans> of;
    for (const Message& message : ranks) of.push_back(message.spans());
    const Spans mine = own.spans();
    std::size_t most = mine.size();
    for (const Spans& spans : of) most = std::max(most, spans.size());
    const bool gathers = whole == Collective::AllGather;
    for (std::size_t i = 0; i < most; ++i) {
      // The call's form decides, because the addresses of tensors differ from rank to rank.
      if (const auto joined = request_.contiguousParts ? consecutive(of, i, mine) : std::nullopt) {
        gathers ? add(whole, -1, &mine[i], &*joined) : add(whole, -1, &*joined, &mine[i]);
        continue;
      }
      for (std::size_t root = 0; root < of.size(); ++root) {
        if (i >= of[root].size()) continue;  // no rank has data for or from that rank
        const bool self = static_cast<int>(root) == rank_;
        const Span* const piece = &of[root][i];
        if (gathers) {
          add(part, static_cast<int>(root), self ? &mine[i] : nullptr, piece);
        } else {
          add(part, static_cast<int>(root), piece, self ? &mine[i] : nullptr);
        }
      }
    }
  }

  void exchange(const std::vector<Message>& in, const std::vector<Message>& out) {
    for (std::size_t peer = 0; peer < std::max(in.size(), out.size()); ++peer) {
      if (peer < in.size()) messages(Collective::Send, static_cast<int>(peer), in[peer]);
      if (peer < out.size()) messages(Collective::Recv, static_cast<int>(peer), out[peer]);
    }
  }

  void messages(Collective direction, int peer, const Message& message) {
    for (const Span& span : message.spans()) {
      const bool sends = direction == Collective::Send;
      add(direction, peer, sends ? &span : nullptr, sends ? nullptr : &span);
    }
  }

 private:
  DeviceSpan spanOf(const Span& span) const {
    return {reinterpret_cast<std::uintptr_t>(span.data),
            static_cast<std::int64_t>(span.bytes / size_)};
  }

  /// Piece i of all ranks as one span, if all are as long as `mine` and consecutive in memory.
  static std::optional<Span> consecutive(const std::vector<Spans>& of, std::size_t i,
                                         const Spans& mine) {
    if (i >= mine.size()) return std::nullopt;
    for (std::size_t rank = 0; rank < of.size(); ++rank) {
      if (i >= of[rank].size() || of[rank][i].bytes != mine[i].bytes) return std::nullopt;
      if (of[rank][i].data != of[0][i].data + rank * mine[i].bytes) return std::nullopt;
    }
    return Span{of[0][i].data, of.size() * mine[i].bytes};
  }

  const Request& request_;
  const int rank_;
  const std::size_t size_;
  std::vector<DeviceRequest>& into_;
};

}  // namespace

void planOnDevice(const Request& request, int rank, std::vector<DeviceRequest>& into) {
  Planner plan(request, rank, into);
  const Message* const in = request.in.empty() ? nullptr : &request.in[0];
  const Message* const out = request.out.empty() ? nullptr : &request.out[0];
  switch (request.collective) {
    case Collective::AllReduce:
    case Collective::Broadcast:
    case Collective::Reduce:
      return plan.pieces(request.collective, in, out);
    case Collective::AllGather:
      return plan.allRanks(*in, request.out, Collective::AllGather, Collective::Broadcast);
    case Collective::ReduceScatter:
      return plan.allRanks(*out, request.in, Collective::ReduceScatter, Collective::Reduce);
    case Collective::Gather:
      plan.messages(Collective::Send, request.root, *in);
      return plan.exchange({}, request.out);
    case Collective::Scatter:
      plan.exchange(request.in, {});
      return plan.messages(Collective::Recv, request.root, *out);
    case Collective::AllToAll:
      return plan.exchange(request.in, request.out);
    case Collective::Send:
      return plan.messages(Collective::Send, request.root, *in);
    case Collective::Recv:
      return plan.messages(Collective::Recv, request.root, *out);
    case Collective::Barrier:
      return plan.add(Collective::Barrier, -1, nullptr, nullptr);
  }
}

}  // namespace fastcoll
