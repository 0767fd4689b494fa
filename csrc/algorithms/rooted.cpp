// Gather, scatter and reduce: one rank, the root, reads from all or writes to all.
//
// Steps: 1 per segment. Bytes read: gather, reduce: the root reads (n - 1) B; scatter: each rank
// reads its own message. As in broadcast, every rank waits for all to arrive, and consumes the last
// segment after that: a peer may give its memory back then.
#include "pipeline.hpp"
#include "segment_reduce.hpp"

namespace fastcoll {
namespace {

/// Non-root side of gather and reduce: publish the message, read nothing.
void publishAll(SegmentStream& stream, const Message& message, std::uint64_t first,
                std::size_t segments, std::size_t step) {
  if (segments > 1) stream.consume(first + segments - 2);
  for (std::size_t s = 0; s < segments; ++s) {
    const std::size_t length = std::min(step, message.bytes() - s * step);
    message.read(s * step, length, stream.acquire(first + s));
    stream.publish(first + s);
  }
}

}  // namespace

void gather(SegmentStream& stream, const Request& request) {
  const Message& in = request.in[0];
  const std::size_t step = std::min(in.bytes(), stream.segmentBytes());
  const std::size_t segments = step == 0 ? 1 : ceilDiv(in.bytes(), step);
  const std::uint64_t first = stream.begin(request.arrival(), step, request.expectedCount, nullptr,
                                           request.deadline, request.timeout);
  if (stream.rank() != request.root) {
    publishAll(stream, in, first, segments, step);
  } else {
    stream.publish(first + segments - 1);
    for (std::size_t s = 0; s < segments; ++s) {
      const std::size_t length = std::min(step, in.bytes() - s * step);
      for (int i = 1; i < stream.size(); ++i) {
        const int peer = (stream.rank() + i) % stream.size();
        const std::uint8_t* slot = stream.await(peer, first + s);
        request.out[static_cast<std::size_t>(peer)].write(s * step, length, slot);
      }
      if (s + 1 < segments) stream.consume(first + s);
    }
    in.copyTo(request.out[static_cast<std::size_t>(stream.rank())]);
  }
  stream.awaitArrivals();
  stream.consume(first + segments - 1);
  stream.end(segments);
}

void reduce(SegmentStream& stream, const Request& request) {
  const Message& in = request.in[0];
  const std::size_t element = elementSize(request.dtype);
  const std::size_t step = std::min(in.bytes(), stream.segmentBytes() / element * element);
  const std::size_t segments = step == 0 ? 1 : ceilDiv(in.bytes(), step);
  SegmentReducer reducer(request, stream.size());
  const std::uint64_t first = stream.begin(request.arrival(), step, request.expectedCount, nullptr,
                                           request.deadline, request.timeout);
  if (stream.rank() != request.root) {
    publishAll(stream, in, first, segments, step);
  } else {
    const Message& out = request.out[0];
    stream.publish(first + segments - 1);
    for (std::size_t s = 0; s < segments; ++s) {
      const std::size_t length = std::min(step, in.bytes() - s * step);
      for (int i = 1; i < stream.size(); ++i) {
        const int peer = (stream.rank() + i) % stream.size();
        reducer.source(peer, stream.await(peer, first + s));
      }
      if (length > 0) {
        // Scratch holds this rank's own part first, then the result in the same place.
        const std::uint8_t* own = in.contiguous(s * step, length);
        std::uint8_t* direct = out.contiguous(s * step, length);
        std::uint8_t* spare =
            own == nullptr || direct == nullptr ? stream.scratch(length) : nullptr;
        if (own == nullptr) {
          in.read(s * step, length, spare);
          own = spare;
        }
        reducer.source(stream.rank(), own);
        std::uint8_t* result = direct != nullptr ? direct : spare;
        reducer.run(result, length / element);
        if (direct == nullptr) out.write(s * step, length, result);
      }
      if (s + 1 < segments) stream.consume(first + s);
    }
  }
  stream.awaitArrivals();
  stream.consume(first + segments - 1);
  stream.end(segments);
}

void scatter(SegmentStream& stream, const Request& request) {
  const bool root = stream.rank() == request.root;
  const Message& out = request.out[0];
  const std::size_t bytes = out.bytes();
  const Strided cut(bytes, stream.size(), stream.segmentBytes());
  const std::uint64_t first =
      stream.begin(request.arrival(), cut.stride * static_cast<std::size_t>(stream.size()),
                   request.expectedCount, nullptr, request.deadline, request.timeout);
  const auto mine = static_cast<std::size_t>(stream.rank());
  const std::uint64_t last = first + cut.segments - 1;
  if (root) {
    if (cut.segments > 1) stream.consume(last - 1);
    for (std::size_t s = 0; s < cut.segments; ++s) {
      std::uint8_t* slot = stream.acquire(first + s);
      for (std::size_t to = 0; to < request.in.size(); ++to) {
        if (to == mine) continue;
        request.in[to].read(cut.offset(s), cut.length(s, bytes), slot + to * cut.stride);
      }
      stream.publish(first + s);
    }
    request.in[mine].copyTo(out);
  } else {
    stream.publish(last);
    for (std::size_t s = 0; s < cut.segments; ++s) {
      const std::uint8_t* slot = stream.await(request.root, first + s);
      out.write(cut.offset(s), cut.length(s, bytes), slot + mine * cut.stride);
      if (s + 1 < cut.segments) stream.consume(first + s);
    }
  }
  stream.awaitArrivals();
  stream.consume(last);
  stream.end(cut.segments);
}

}  // namespace fastcoll
