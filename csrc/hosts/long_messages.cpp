#include "long_messages.hpp"

#include <algorithm>

#include "../base/interrupt.hpp"
#include "../transport/wait.hpp"
#include "spanning.hpp"

namespace fastcoll {
namespace {
constexpr std::size_t kShort = 32 * 1024;
}

bool LongMessages::areLong(std::size_t bytes) {
  return bytes > kShort;
}

LongMessages::LongMessages(Spanning& spanning, const Request& request)
    : spanning_(spanning), memory_(*spanning.memory), request_(request) {}

/// Names the rank whose connection broke.
template <typename Call>
auto LongMessages::lost(int rank, Call call) const {
  try {
    return call();
  } catch (const ConnectionLost& error) {
    throw ConnectionLost(error.kind(),
                         spanning_.prefix + brokeOff(memory_.memberName(rank), error.what()));
  }
}

void LongMessages::begin() {
  if (ways_.empty()) return;
  if (connections_ == nullptr) connections_ = &spanning_.connections();
  for (Way& way : ways_) {
    if (!way.begun && lost(way.rank, [&] { return connections_->borrow(way.rank); })) begin(way);
  }
}

void LongMessages::begin(Way& way) {
  const std::size_t bytes = way.message->bytes();
  std::uint8_t* const memory = way.message->contiguous(0, bytes);
  if (memory == nullptr) {
    throw Error(ErrorKind::Backend, spanning_.prefix + "a message to another host lies in pieces");
  }
  way.transfer = lost(way.rank, [&] {
    return way.sends ? connections_->sendTo(way.rank, memory, bytes)
                     : connections_->receiveFrom(way.rank, memory, bytes);
  });
  way.begun = true;
}

void LongMessages::finish() {
  began_ = Clock::now();
  const auto waits = [](const Way& way) { return !way.begun; };
  for (;;) {
    const auto way = std::find_if(ways_.begin(), ways_.end(), waits);
    if (way == ways_.end()) break;
    begin();
    if (way->begun) continue;
    connections_->awaitConnection(Clock::now() + kWaitSlice);
    checkTime(*way);
  }
  for (Way& way : ways_) wait(way);
  if (connections_ != nullptr) connections_->giveBack();
}

void LongMessages::wait(Way& way) {
  const auto ended = [&] { return way.transfer->wait(Clock::now() + kWaitSlice); };
  while (!lost(way.rank, ended)) {
    checkTime(way);
  }
  way.transfer.reset();
}

/// Between waits: throws when the group has failed, or time is up, and with it the time for hosts
/// to say who has kept them.
void LongMessages::checkTime(const Way& way) {
  if (spanning_.links != nullptr) {
    spanning_.links->check(began_);
  } else {
    checkInterrupt();
    spanning_.stream->throwIfAborted();
  }
  if (Clock::now() < deadlineAfter(request_.deadline, 2 * kGrace)) return;
  throw Error(
      ErrorKind::Timeout,
      concat(spanning_.prefix, "Timed out after ", request_.timeout.count(), " ms in ",
             describe(request_.arrival()),
             "; not arrived, or not heard of over the network: ", memory_.memberName(way.rank)));
}

}  // namespace fastcoll
