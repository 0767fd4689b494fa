// A barrier over the rendezvous store that finds missing ranks.
//
//   mb/<k>/<rank>   the rank has arrived at its k-th monitored barrier; the value is its nonce
//   mb/<k>/go       rank 0's verdict: its own nonce, then "ok" or "missing"
//
// The nonces invalidate what an earlier group of the same name left in the store.
#include "rendezvous.hpp"

namespace fastcoll {

void Rendezvous::monitoredBarrier(Milliseconds timeout, bool waitAllRanks) {
  const auto deadline = deadlineAfter(Clock::now(), timeout);
  const auto& id = memory_.identity();
  const std::string where = errorHead("monitored_barrier", id);
  const std::string base = concat("fastcoll/mb/", ++monitored_, "/");
  const auto stamp = [](std::uint64_t nonce) { return std::to_string(nonce); };
  if (timeout.count() <= 0) {
    throw Error(ErrorKind::Timeout,
                concat(where, "Rank ", id.rank, " timed out in monitoredBarrier after ",
                       timeout.count(), " ms. Pass a timeout above 0."));
  }
  store_.set(base + std::to_string(id.rank), stamp(own_.nonce));

  std::vector<bool> here(id.size, false);
  here[id.rank] = true;
  for (int round = 0;; pause(round)) {
    const bool late = Clock::now() >= deadline;
    if (id.rank == 0) {
      std::string missing;
      int absent = 0;
      for (int peer = 1; peer < id.size; ++peer) {
        const std::size_t i = peer;
        GroupRecord record{};
        std::string value;
        if (!here[i]) {
          here[i] = read(peer, record) && store_.tryGet(base + std::to_string(peer), value) &&
                    value == stamp(record.nonce);
        }
        if (!here[i] && (absent++ == 0 || waitAllRanks)) {
          missing += (missing.empty() ? "" : ", ") + std::to_string(peer);
        }
      }
      if (absent == 0) return store_.set(base + "go", stamp(own_.nonce) + "ok");
      if (!late) continue;
      store_.set(base + "go", stamp(own_.nonce) + "missing");
      const bool several = waitAllRanks && absent > 1;
      throw Error(ErrorKind::Timeout,
                  concat(where, several ? "Ranks " : "Rank ", missing,
                         " failed to pass monitoredBarrier in ", timeout.count(),
                         " ms. Find the delay, or raise the timeout."));
    }
    GroupRecord first{};
    std::string verdict;
    const bool decided = read(0, first) && store_.tryGet(base + "go", verdict) &&
                         verdict.rfind(stamp(first.nonce), 0) == 0;
    if (decided && verdict == stamp(first.nonce) + "ok") return;
    // Rank 0 decides. It may have begun its wait later, so this rank waits a little longer.
    if (decided || Clock::now() >= deadlineAfter(deadline, Milliseconds(500))) {
      throw Error(
          ErrorKind::Timeout,
          concat(
              where, "Rank ", id.rank,
              " successfully reached monitoredBarrier, but received errors while waiting "
              "for send/recv from rank 0",
              decided ? ", whose message names the rank that is missing" : ", which did not arrive",
              " (", timeout.count(),
              decided ? " ms). Read the error of rank 0."
                      : " ms). Find the delay of rank 0, or raise the timeout."));
    }
  }
}

}  // namespace fastcoll
