#include "parcels.hpp"

#include <cstring>

namespace fastcoll {

void Parcels::tellSizes(SegmentStream* stream, std::size_t segmentBytes) {
  if (!isAllToAll()) return;
  const std::size_t ranks = hosts_.size();
  Sizes own(2 * ranks);
  for (std::size_t peer = 0; peer < ranks; ++peer) {
    own[peer] = request_.in[peer].bytes();
    own[ranks + peer] = request_.out[peer].bytes();
  }
  told_.assign(hosts_.local().size(), {});
  told_[place_] = own;
  if (stream == nullptr) return;
  const std::size_t size = own.size() * sizeof own[0];
  const std::size_t most = std::max<std::size_t>(segmentBytes / sizeof own[0], 8);
  for (std::size_t first = 0; first < own.size(); first += most) {
    const std::size_t count = std::min(most, own.size() - first);
    const Segment segment = stream->place(std::min(size, count * sizeof own[0]));
    stream->fill(segment, [&](std::uint8_t* memory, bool) {
      std::memcpy(memory, own.data() + first, count * sizeof own[0]);
      return count * sizeof own[0];
    });
    stream->publish(segment);
    for (std::size_t p = 0; p < told_.size(); ++p) {
      if (p == place_) continue;
      told_[p].resize(own.size());
      const std::uint8_t* memory = stream->await(static_cast<int>(p), segment);
      std::memcpy(told_[p].data() + first, memory, count * sizeof own[0]);
    }
    stream->consume(segment);
  }
}

/// The slice length is equal on all hosts. In a step a rank's segment holds a slice of each of its
/// parcels. The leader's also holds one of each parcel that arrives.
void Parcels::cut(std::size_t room) {
  const bool one = areShared() || request_.collective == Collective::Gather;
  const int given = one ? 1 : hosts_.count() - 1;
  std::size_t least = hosts_.local().size();
  for (int host = 0; host < hosts_.count(); ++host) {
    least = std::min(least, hosts_.ranks(host).size());
  }
  const int taken =
      request_.collective == Collective::Scatter ? 1 : hosts_.size() - static_cast<int>(least);
  slice_ = std::max<std::size_t>(1, room / (given + taken));
}

std::size_t Parcels::steps() const {
  std::size_t steps = 1;
  for (int host = 0; host < hosts_.count(); ++host) {
    if (host != here_) steps = std::max({steps, stepsOf(here_, host), stepsOf(host, here_)});
  }
  return steps;
}

std::size_t Parcels::parcel(int from, std::size_t place, int to) const {
  const int rank = hosts_.ranks(from)[place];
  switch (request_.collective) {
    case Collective::AllGather:
      return request_.out[rank].bytes();
    case Collective::Gather:
      return to == hosts_.hostOf(request_.root) ? carried(request_.in[0].bytes()) : 0;
    case Collective::Scatter:
      return rank == request_.root ? carried(request_.out[0].bytes()) * hosts_.ranks(to).size() : 0;
    default: {
      std::size_t sum = 0;
      if (from == here_) {
        for (const int peer : hosts_.ranks(to)) sum += carried(given(place, peer));
      } else {
        for (std::size_t p = 0; p < told_.size(); ++p) sum += carried(expected(p, rank));
      }
      return sum;
    }
  }
}

std::size_t Parcels::sliceBytes(int from, std::size_t place, int to, std::size_t k) const {
  const std::size_t all = parcel(from, place, to);
  return start(k) >= all ? 0 : std::min(slice_, all - start(k));
}

std::size_t Parcels::slices(int from, int to, std::size_t k) const {
  std::size_t sum = 0;
  for (std::size_t p = 0; p < hosts_.ranks(from).size(); ++p) sum += sliceBytes(from, p, to, k);
  return sum;
}

std::size_t Parcels::stepsOf(int from, int to) const {
  std::size_t most = 0;
  for (std::size_t p = 0; p < hosts_.ranks(from).size(); ++p) {
    most = std::max(most, parcel(from, p, to));
  }
  return ceilDiv(most, slice_);
}

bool Parcels::inFrame(int from, int to) const {
  return stepsOf(from, to) <= 1 && headBytes(from, to) + slices(from, to, 0) <= Links::kInlineBytes;
}

std::size_t Parcels::placeIn(std::size_t place, int to, std::size_t k) const {
  std::size_t at = 0;
  for (int host = 0; host < to && !areShared(); ++host) {
    if (host != here_) at += sliceBytes(here_, place, host, k);
  }
  return at;
}

std::size_t Parcels::placeOut(int from, std::size_t k) const {
  std::size_t at = 0;
  for (int host = 0; host < from; ++host) {
    if (host != here_) at += slices(host, here_, k);
  }
  return at;
}

std::size_t Parcels::mostIn(std::size_t k) const {
  std::size_t most = 0;
  for (std::size_t p = 0; p < hosts_.local().size(); ++p) {
    const int last = hosts_.count() - 1 == here_ ? hosts_.count() - 2 : hosts_.count() - 1;
    most = std::max(most, placeIn(p, last, k) + sliceBytes(here_, p, last, k));
  }
  return most;
}

std::size_t Parcels::headBytes(int from, int to) const {
  if (!isAllToAll()) return 0;
  return 2 * sizeof(std::uint64_t) * hosts_.ranks(from).size() * hosts_.ranks(to).size();
}

std::uint8_t* Parcels::writeHead(int host, std::uint8_t* at) const {
  for (std::size_t p = 0; p < told_.size(); ++p) {
    for (const int peer : hosts_.ranks(host)) {
      const std::uint64_t sizes[] = {given(p, peer), expected(p, peer)};
      std::memcpy(at, sizes, sizeof sizes);
      at += sizeof sizes;
    }
  }
  return at;
}

void Parcels::compareHead(const Links& links, int host) const {
  const std::size_t head = headBytes(host, here_);
  if (links.frameBytes(host) < head) (void)links.frameOf(host, head);
  const std::uint8_t* at = links.frameOf(host, links.frameBytes(host));
  for (const int peer : hosts_.ranks(host)) {
    for (std::size_t p = 0; p < told_.size(); ++p) {
      std::uint64_t sizes[2];  // sent to this host's rank, and expected of it
      std::memcpy(sizes, at, sizeof sizes);
      at += sizeof sizes;
      const int own = hosts_.local()[p];
      if (sizes[0] != expected(p, peer)) links.disagree(peer, own, sizes[0], expected(p, peer));
      if (sizes[1] != given(p, peer)) links.disagree(own, peer, given(p, peer), sizes[1]);
    }
  }
}

}  // namespace fastcoll
