// What the collectives between hosts have in common. A message is cut into chunks:
//
//   start(c)    Every rank publishes its data of chunk c to the ranks of its host. The leader posts
//               the chunk's receives from other leaders, and sends what it has.
//
//   combine(c)  One chunk later, only in a sum: the leader sums what has arrived, and sends it.
//
//   finish(c)   `lag` chunks later, the leader waits for its receives and publishes the result.
//               Each rank takes its own data from it.
//
// So the network moves chunks while ranks copy others. All ranks of a host place the same segments
// in the same order. A follower, that is a rank other than the leader, only fills and reads them.
//
// A chunk has a slot: its transfers, and scratch memory for them. The slot's next chunk starts when
// the slot's sends have ended.
#pragma once

#include <array>
#include <utility>
#include <vector>

#include "cpu/hosts/multi_host.hpp"

namespace fastcoll {

class HostPipeline {
 protected:
  HostPipeline(MultiHost& multiHost, const Request& request)
      : multiHost_(multiHost),
        request_(request),
        hosts_(multiHost.hosts),
        stream_(multiHost.stream),
        links_(multiHost.links.get()),
        here_(hosts_.here()),
        localRank_(hosts_.place()) {}

  /// Call before runChunks(). `buffers`: the scratch buffers of each slot.
  void useSlots(std::size_t slots, std::size_t buffers) {
    slotCount_ = slots;
    buffers_ = buffers;
    if (!leads()) return;
    multiHost_.scratch.resize(std::max(multiHost_.scratch.size(), slots * buffers));
  }
  bool leads() const { return hosts_.leads(); }

  // The host's stream. A rank that is alone on its host has none.
  void begin() {
    if (stream_ == nullptr) return;
    stream_->begin(request_, localCounts(), {}, nullptr, request_.deadline, request_.timeout);
  }
  void end() {
    if (stream_ != nullptr) stream_->end();
  }
  /// The counts that the ranks of this host announce, if they differ from this rank's.
  std::vector<std::uint64_t> localCounts() const {
    std::vector<std::uint64_t> counts;
    if (request_.expectedCount.empty()) return counts;
    for (const int rank : hosts_.local()) counts.push_back(request_.expectedCount[rank]);
    return counts;
  }
  Segment place(std::size_t bytes) {
    return stream_ != nullptr ? stream_->reserve(bytes) : Segment{};
  }
  void publish(const Segment& segment) {
    if (stream_ != nullptr) stream_->publish(segment);
  }
  void consume(const Segment& segment) {
    if (stream_ != nullptr) stream_->consume(segment);
  }

  // --- chunks ----------------------------------------------------------------------------------

  struct Slot {
    Segment in, out;
    std::vector<std::pair<int, TransferRef>> sends, receives[2];  // of the first and second step
  };

  template <typename Start, typename Combine, typename Finish>
  void runChunks(std::size_t chunks, std::size_t lag, Start start, Combine combine, Finish finish) {
    for (std::size_t c = 0; c < chunks + lag; ++c) {
      if (c < chunks) {
        awaitSends(c);
        start(c);
      }
      if (c >= 1 && c - 1 < chunks) combine(c - 1);
      if (c >= lag) finish(c - lag);
    }
    for (std::size_t c = 0; c < slotCount_; ++c) awaitSends(c);
  }
  template <typename Start, typename Finish>
  void runChunks(std::size_t chunks, std::size_t lag, Start start, Finish finish) {
    runChunks(chunks, lag, start, [](std::size_t) {}, finish);
  }
  Slot& slot(std::size_t c) { return slots_[c % slotCount_]; }
  std::uint8_t* scratch(std::size_t c, std::size_t buffer, std::size_t bytes) {
    return enlarged(std::max<std::size_t>(bytes, 1),
                    multiHost_.scratch[c % slotCount_ * buffers_ + buffer]);
  }
  /// Begins a transfer of the chunk, unless it is empty.
  void send(std::size_t c, int host, const std::uint8_t* data, std::size_t bytes,
            Links::StepTag step = Links::kFirstStep) {
    if (bytes > 0) slot(c).sends.emplace_back(host, links_->send(host, data, bytes, step));
  }
  void receive(std::size_t c, int host, std::uint8_t* data, std::size_t bytes,
               Links::StepTag step = Links::kFirstStep) {
    if (bytes == 0) return;
    slot(c).receives[step - Links::kFirstStep].emplace_back(
        host, links_->receive(host, data, bytes, step));
  }
  void awaitSends(std::size_t c) { await(slot(c).sends); }
  void awaitReceives(std::size_t c, Links::StepTag step = Links::kFirstStep) {
    await(slot(c).receives[step - Links::kFirstStep]);
  }

  MultiHost& multiHost_;
  const Request& request_;
  const Hosts& hosts_;
  SegmentStream* const stream_;  // null if this rank is alone on its host
  Links* const links_;           // null if this rank is a follower
  const int here_;
  const std::size_t localRank_;

 private:
  void await(std::vector<std::pair<int, TransferRef>>& transfers) {
    for (auto& [host, transfer] : transfers) links_->wait(host, transfer);
    transfers.clear();
  }

  static constexpr std::size_t kMostSlots = 3;
  std::size_t slotCount_ = 1, buffers_ = 0;
  std::array<Slot, kMostSlots> slots_;
};

}  // namespace fastcoll
