// A barrier over the rendezvous store that finds missing ranks. Its k-th call is the round "k" of a
// Roster without an id. A rank's text in the round is its record's nonce when it has arrived. Rank
// 0 posts its text last, as the verdict: its nonce, then "ok" or "missing". The nonces invalidate
// what an earlier group of the same name left in the store. When a round ends well, all ranks have
// left those before, so their keys are deleted.
#include <numeric>

#include "group/rendezvous.hpp"

namespace fastcoll {
namespace {

// Between polls for a cancellation while another barrier runs.
constexpr Milliseconds kSlice{20};

}  // namespace

void Rendezvous::monitoredBarrier(Milliseconds timeout, bool waitAllRanks) {
  const auto deadline = deadlineAfter(Clock::now(), timeout);
  const auto& id = memory_.identity();
  const ErrorSite where = errorSite("monitored_barrier", id);
  std::unique_lock<std::timed_mutex> alone(barrierMutex_, std::defer_lock);
  while (!alone.try_lock_for(kSlice)) {
    throwIfCancelled();
    if (Clock::now() < deadline) continue;
    throw Error(ErrorKind::Timeout, where, "Rank ", id.rank, " waited ", timeout.count(),
                " ms for another monitoredBarrier of this group to end. Call it from one "
                "thread, or raise the timeout.");
  }
  const std::string round = std::to_string(++barrier_);
  const auto forget = [this] {
    for (; barrierKept_ < barrier_; ++barrierKept_) barriers_.erase(std::to_string(barrierKept_));
  };
  if (timeout.count() <= 0) {
    throw Error(ErrorKind::Timeout, where, "Rank ", id.rank,
                " timed out in monitoredBarrier after ", timeout.count(),
                " ms. Pass a timeout above 0.");
  }
  const std::string own = std::to_string(own_.nonce);
  // What a rank has posted after its nonce; nullopt if it has posted nothing.
  const auto posted = [&](int rank) -> std::optional<std::string> {
    GroupRecord record{};
    std::string text;
    if (!read(rank, record) || !barriers_.get(round, rank, text)) return std::nullopt;
    const std::string nonce = std::to_string(record.nonce);
    if (text.rfind(nonce, 0) != 0) return std::nullopt;
    return text.substr(nonce.size());
  };
  if (id.rank != 0) {
    barriers_.post(round, own);
    std::optional<std::string> verdict;
    // Rank 0 decides. It may have begun its wait later, so this rank waits a little longer.
    const auto last = deadlineAfter(deadline, Milliseconds(500));
    for (int polls = 0; !(verdict = posted(0)) && Clock::now() < last; pause(polls)) {
      throwIfCancelled();
    }
    if (verdict == "ok") return forget();
    throw Error(
        ErrorKind::Timeout, where, "Rank ", id.rank,
        " successfully reached monitoredBarrier, but received errors while waiting for "
        "send/recv from rank 0",
        verdict ? ", whose message names the rank that is missing" : ", which did not arrive", " (",
        timeout.count(),
        verdict ? " ms). Read the error of rank 0."
                : " ms). Find the delay of rank 0, or raise the timeout.");
  }
  std::vector<int> missing(id.size - 1);
  std::iota(missing.begin(), missing.end(), 1);
  for (int polls = 0;; pause(polls)) {
    throwIfCancelled();
    const bool late = Clock::now() >= deadline;
    std::erase_if(missing, [&](int rank) { return posted(rank).has_value(); });
    if (missing.empty()) {
      barriers_.post(round, own + "ok");
      return forget();
    }
    if (late) break;
  }
  barriers_.post(round, own + "missing");
  if (!waitAllRanks) missing.resize(1);
  throw Error(ErrorKind::Timeout, where, missing.size() > 1 ? "Ranks " : "Rank ", listOf(missing),
              " failed to pass monitoredBarrier in ", timeout.count(),
              " ms. Find the delay, or raise the timeout.");
}

}  // namespace fastcoll
