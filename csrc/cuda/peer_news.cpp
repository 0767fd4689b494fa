#include "cuda/peer_news.hpp"

#include <pthread.h>

#include <sstream>
#include <thread>
#include <utility>

#include "base/error.hpp"
#include "base/log.hpp"
#include "base/thread.hpp"

namespace fastcoll {
namespace {

constexpr Milliseconds kNewsTick{1000};
constexpr Milliseconds kPoll{50};

std::string progressKey(const Meeting& meeting, int rank) {
  return concat(meeting.instance, "/progress/", rank);
}

}  // namespace

PeerNews::PeerNews(int rank, int size, std::unique_ptr<KeyValueStore> store,
                   std::shared_ptr<Communicators> communicators)
    : rank_(rank),
      size_(size),
      store_(std::move(store)),
      errors_(store_, [this](std::function<void()> job) { enqueue(std::move(job)); }),
      communicators_(std::move(communicators)),
      progress_(size) {}

void PeerNews::start(std::function<void()> onTick) {
  const std::lock_guard<std::mutex> lock(mutex_);
  onTick_ = std::move(onTick);
  startLocked();
}

void PeerNews::startLocked() {
  if (running_ || closed_) return;
  startThread([self = shared_from_this()] { self->run(); }).detach();
  running_ = true;
}

std::string PeerNews::heard() const {
  const auto first = errors_.first();
  return first ? first->text : "";
}

/// The keys also of meetings with one rank alone: that rank passes the fault on to its other peers.
/// A meeting of all ranks comes first, because the first key names the fault that came before.
std::vector<std::string> PeerNews::faultKeys() const {
  std::vector<std::string> keys;
  for (const Meeting& meeting : communicators_->meetings()) {
    keys.insert(meeting.peer < 0 ? keys.begin() : keys.end(), faultKey(meeting.instance));
  }
  return keys;
}

void PeerNews::enqueue(std::function<void()> job) {
  const std::lock_guard<std::mutex> lock(mutex_);
  startLocked();
  jobs_.push_back(std::move(job));
  changed_.notify_all();
}

void PeerNews::tell(const std::string& cause, std::string progress, Milliseconds patience) {
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    startLocked();  // throws here, not in publish(), which would then publish nothing
  }
  const std::string mine = cause.empty() ? heard() : concat("rank ", rank_, ": ", cause);
  errors_.publish(faultKeys(), {ErrorKind::Backend, mine}, Milliseconds(0));
  reports_ = !cause.empty();
  enqueue([this, progress = std::move(progress), patience] { exchange(progress, patience); });
}

std::optional<std::string> PeerNews::answers() const {
  if (!answered_) return std::nullopt;
  return answersSoFar();
}

void PeerNews::stop(Milliseconds grace) noexcept {
  std::unique_lock<std::mutex> lock(mutex_);
  closed_ = true;
  changed_.notify_all();
  changed_.wait_for(lock, grace, [this] { return !running_; });
}

void PeerNews::run() noexcept {
  ::pthread_setname_np(::pthread_self(), "fastcoll-news");
  std::unique_lock<std::mutex> lock(mutex_);
  while (true) {
    changed_.wait_for(lock, kNewsTick, [this] { return closed_ || !jobs_.empty(); });
    // Report a fault even if the group ends right after it: the other ranks wait for the report.
    if (!jobs_.empty()) {
      const auto job = std::move(jobs_.front());
      jobs_.pop_front();
      lock.unlock();
      job();
      lock.lock();
      continue;
    }
    if (closed_) break;
    const auto onTick = onTick_;
    lock.unlock();
    if (onTick) onTick();
    if (!answered_) errors_.check(faultKeys(), Milliseconds(0));
    lock.lock();
  }
  running_ = false;
  changed_.notify_all();
}

/// Posts this rank's progress, and polls for that of the others.
void PeerNews::exchange(const std::string& progress, Milliseconds patience) noexcept {
  const auto until = deadlineAfter(Clock::now(), patience);
  std::vector<std::pair<Meeting, int>> open;
  for (const Meeting& meeting : communicators_->meetings()) {
    for (int rank = 0; rank < size_; ++rank) {
      if (meeting.peer < 0 || rank == meeting.peer || rank == rank_)
        open.emplace_back(meeting, rank);
    }
    if (meeting.peer < 0) break;  // this meeting has all ranks
  }
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    for (const auto& [meeting, rank] : open) asked_.push_back(rank);
  }
  try {
    for (const Meeting& meeting : communicators_->meetings()) {
      store_->set(progressKey(meeting, rank_), progress);
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
