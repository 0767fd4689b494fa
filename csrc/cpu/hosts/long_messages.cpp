#include "cpu/hosts/long_messages.hpp"

#include <algorithm>

#include "base/interrupt.hpp"
#include "cpu/hosts/multi_host.hpp"
#include "cpu/point_to_point/point_to_point.hpp"
#include "shm/wait.hpp"

namespace fastcoll {

/// Runs `call`. If the connection breaks, the error names the rank.
template <typename Call>
auto LongMessages::lost(int rank, Call call) const {
  try {
    return call();
  } catch (const ConnectionLost& error) {
    if (multiHost_.links != nullptr) multiHost_.links->throwIfLeft(multiHost_.hosts.hostOf(rank));
    throw ConnectionLost(error.kind(), multiHost_.site,
                         brokeOff(multiHost_.memory->memberName(rank), error.what()));
  }
}

void LongMessages::begin() {
  if (pending_.empty()) return;
  for (Pending& one : pending_) {
    if (one.transfer != nullptr) continue;
    if (!lost(one.rank, [&] { return multiHost_.connections->borrow(one.rank); })) continue;
    const std::size_t bytes = one.message->bytes();
    std::uint8_t* memory = one.message->contiguous(0, bytes);
    if (memory == nullptr) {
      multiHost_.copies.emplace_back(new std::uint8_t[bytes]);
      one.copy = memory = multiHost_.copies.back().get();
      if (one.sends) one.message->read(0, bytes, memory);
    }
    one.transfer = lost(one.rank, [&] {
      return multiHost_.connections->transfer(one.rank, one.sends, memory, bytes);
    });
  }
}

void LongMessages::finish() {
  began_ = Clock::now();
  const auto waits = [](const Pending& one) { return one.transfer == nullptr; };
  for (;;) {
    const auto one = std::ranges::find_if(pending_, waits);
    if (one == pending_.end()) break;
    begin();
    if (one->transfer != nullptr) continue;
    multiHost_.connections->awaitConnection(Clock::now() + kWaitSlice);
    checkTime(*one);
  }
  for (Pending& one : pending_) {
    const auto ended = [&] { return one.transfer->wait(Clock::now() + kWaitSlice); };
    while (!lost(one.rank, ended)) checkTime(one);
    one.transfer.reset();
    if (one.copy != nullptr && !one.sends) {
      one.message->write(0, one.message->bytes(), one.copy);
    }
  }
  multiHost_.copies.clear();
  if (!pending_.empty()) multiHost_.connections->giveBack();
}

/// Call between waits. Throws if the group has failed. Throws a time-out when the deadline has
/// passed and, after it, the time for hosts to report their late ranks.
void LongMessages::checkTime(const Pending& one) {
  if (multiHost_.links != nullptr) {
    multiHost_.links->check(began_);
  } else {
    checkInterrupt();
    multiHost_.stream->throwIfAborted();
    multiHost_.faults.throwIfPublished(multiHost_.site);  // the leader may have nothing to wait for
  }
  if (Clock::now() < deadlineAfter(*request_.deadline, 2 * kGrace)) return;
  throw Error(ErrorKind::Timeout, multiHost_.site,
              timedOut(request_, request_.timeout,
                       concat(kUnreachable, multiHost_.memory->memberName(one.rank))));
}

}  // namespace fastcoll
