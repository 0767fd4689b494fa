#include "cuda/peer_news.hpp"

#include <pthread.h>

#include <sstream>
#include <thread>
#include <utility>

#include "base/error.hpp"
#include "base/log.hpp"
#include "base/thread.hpp"
#include "group/faults.hpp"

namespace fastcoll {
namespace {

constexpr Milliseconds kPoll{50};

std::string progressKey(const FaultDomain& domain, int rank) {
  return concat(domain.instance, "/progress/", rank);
}

}  // namespace

PeerNews::PeerNews(int rank, int size, std::unique_ptr<KeyValueStore> store,
                   std::shared_ptr<FaultBell> bell, std::shared_ptr<Communicators> communicators)
    : rank_(rank),
      size_(size),
      store_(std::move(store)),
      bell_(std::move(bell)),
      communicators_(std::move(communicators)),
      progress_(size) {}

std::string PeerNews::heard() const {
  const std::lock_guard<std::mutex> lock(mutex_);
  return first_.value_or("");
}

void PeerNews::hear(const std::string& fault) {
  const std::lock_guard<std::mutex> lock(mutex_);
  if (!first_) first_ = fault;
}

/// The keys also of domains with one rank alone: that rank passes the fault on to its other peers.
/// A domain of all ranks comes first, because the first key names the fault that came before.
std::vector<std::string> PeerNews::faultKeys() const {
  std::vector<std::string> keys;
  for (const FaultDomain& domain : communicators_->domains()) {
    keys.insert(domain.peer < 0 ? keys.begin() : keys.end(), faultKey(domain.instance));
  }
  return keys;
}

void PeerNews::listen(std::uint64_t second) noexcept {
  try {
    const std::uint64_t rings = bell_->rings(second);
    const std::vector<std::string> keys = faultKeys();
    // A domain may be added after the ring that was for it.
    if (rings == 0 || std::pair(rings, keys.size()) == listened_) return;
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      if (first_) return;
    }
    for (const std::string& key : keys) {
      const auto fault = readFault(*store_, key);
      if (!fault) continue;
      const std::lock_guard<std::mutex> lock(mutex_);
      if (!first_) first_ = fault->text;
      return;
    }
    listened_ = {rings, keys.size()};
  } catch (const std::exception&) {  // again after a second
  }
}

void PeerNews::tell(const std::string& cause, std::string progress, Milliseconds patience) {
  std::string first = heard();
  if (first.empty()) first = concat("rank ", rank_, ": ", cause);
  reports_ = !cause.empty();
  const std::lock_guard<std::mutex> lock(mutex_);
  startThread([self = shared_from_this(), first, progress = std::move(progress), patience] {
    ::pthread_setname_np(::pthread_self(), "fastcoll-tell");
    self->report(first);
    self->exchange(progress, patience);
    const std::lock_guard<std::mutex> again(self->mutex_);
    self->telling_ = false;
    self->changed_.notify_all();
  }).detach();
  telling_ = true;
}

/// Publishes a fault under all keys, because some rank may read only this rank's. The first key may
/// hold an earlier fault already: then this rank hands that one on.
void PeerNews::report(std::string first) noexcept {
  try {
    bool known = false;
    for (const std::string& key : faultKeys()) {
      std::string there = writeFault(*store_, key, {ErrorKind::Backend, first}).text;
      if (!std::exchange(known, true)) first = std::move(there);
    }
    bell_->ring();
  } catch (const std::exception&) {  // without the store each rank detects the fault itself
  }
  const std::lock_guard<std::mutex> lock(mutex_);
  if (!first_) first_ = std::move(first);
}

std::optional<std::string> PeerNews::answers() const {
  if (!answered_) return std::nullopt;
  return answersSoFar();
}

void PeerNews::stop(Milliseconds grace) noexcept {
  std::unique_lock<std::mutex> lock(mutex_);
  changed_.wait_for(lock, grace, [this] { return !telling_; });
}

/// Posts this rank's progress, and polls for that of the others.
void PeerNews::exchange(const std::string& progress, Milliseconds patience) noexcept {
  const auto until = deadlineAfter(Clock::now(), patience);
  std::vector<std::pair<FaultDomain, int>> open;
  for (const FaultDomain& domain : communicators_->domains()) {
    for (int rank = 0; rank < size_; ++rank) {
      if (domain.peer < 0 || rank == domain.peer || rank == rank_) open.emplace_back(domain, rank);
    }
    if (domain.peer < 0) break;  // this domain has all ranks
  }
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    for (const auto& [domain, rank] : open) asked_.push_back(rank);
  }
  try {
    for (const FaultDomain& domain : communicators_->domains()) {
      store_->set(progressKey(domain, rank_), progress);
    }
    while (!open.empty() && Clock::now() < until) {
      for (auto it = open.begin(); it != open.end();) {
        std::string said;
        if (!store_->tryGet(progressKey(it->first, it->second), said)) {
          ++it;
          continue;
        }
        const std::lock_guard<std::mutex> lock(mutex_);
        progress_[it->second] = said;
        it = open.erase(it);
      }
      if (!open.empty()) std::this_thread::sleep_for(kPoll);
    }
  } catch (const std::exception& error) {
    log(LogLevel::Warn, concat("the store failed while a fault was reported: ", error.what()));
    const std::lock_guard<std::mutex> lock(mutex_);
    trouble_ = concat(" (the store failed: ", error.what(), ")");
  }
  answered_ = true;
}

std::string PeerNews::answersSoFar() const {
  const std::string first = reports_ ? heard() : "";
  const bool own = first.rfind(concat("rank ", rank_, ": "), 0) == 0;
  std::string text = first.empty() || own ? "" : ". Reported before: " + first;
  const char* comma = ". ";
  const std::lock_guard<std::mutex> lock(mutex_);
  std::vector<bool> told(progress_.size());
  for (const int rank : asked_) {
    const std::size_t at = rank;
    if (told[at]) continue;
    told[at] = true;
    text += concat(std::exchange(comma, "; "), "rank ", rank);
    if (progress_[at].empty()) {
      text += " sends no report";
      continue;
    }
    std::istringstream parts(progress_[at]);
    std::string completed;
    std::string issued;
    std::string under;
    parts >> completed >> issued;
    std::getline(parts >> std::ws, under);
    text += concat(" completed call ", completed, " of ", issued, ", under way: ", under);
  }
  return text + trouble_;
}

}  // namespace fastcoll
