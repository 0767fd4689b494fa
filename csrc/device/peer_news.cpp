#include "peer_news.hpp"

#include <pthread.h>

#include <sstream>
#include <thread>
#include <utility>

#include "../base/error.hpp"
#include "../base/log.hpp"
#include "../base/thread.hpp"
#include "../group/told_fault.hpp"

namespace fastcoll {
namespace {

constexpr Milliseconds kTick{1000};
constexpr Milliseconds kPoll{50};
constexpr int kPatience = 5;  // failures of the store in a row, after which it is not polled

std::string progressKey(const Meeting& meeting, int rank) {
  return concat(meeting.instance, "/progress/", rank);
}

}  // namespace

PeerNews::PeerNews(int rank, int size, std::unique_ptr<KeyValueStore> store,
                   std::shared_ptr<Communicators> communicators)
    : rank_(rank),
      size_(size),
      store_(std::move(store)),
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
  const std::lock_guard<std::mutex> lock(mutex_);
  return heard_;
}

void PeerNews::tell(std::string cause, std::string progress, Milliseconds patience) {
  const std::lock_guard<std::mutex> lock(mutex_);
  startLocked();
  telling_ = Telling{std::move(cause), std::move(progress), patience};
  changed_.notify_all();
}

std::optional<std::string> PeerNews::answers() const {
  const std::lock_guard<std::mutex> lock(mutex_);
  if (!answered_) return std::nullopt;
  return sentence();
}

std::string PeerNews::answersSoFar() const {
  const std::lock_guard<std::mutex> lock(mutex_);
  return sentence();
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
    changed_.wait_for(lock, kTick, [this] { return closed_ || telling_; });
    // Report a fault even if the group ends right after it: the other ranks wait for the report.
    if (auto telling = std::exchange(telling_, std::nullopt)) {
      lock.unlock();
      announce(*telling);
      ask(*telling);
      lock.lock();
      answered_ = true;
    } else if (closed_) {
      break;
    } else {
      const auto onTick = onTick_;
      const bool looks = !answered_ && heard_.empty() && failures_ < kPatience;
      lock.unlock();
      if (onTick) onTick();
      if (looks) look();
      lock.lock();
    }
  }
  running_ = false;
  changed_.notify_all();
}

void PeerNews::look() {
  for (const Meeting& meeting : communicators_->meetings()) {
    std::optional<ToldFault> fault;
    try {
      fault = readFault(*store_, faultKey(meeting.instance));
      failures_ = 0;
      if (!fault) continue;
    } catch (const std::exception&) {
      ++failures_;  // the store may end before the group does
      return;
    }
    const std::lock_guard<std::mutex> lock(mutex_);
    if (heard_.empty()) heard_ = fault->text;
  }
}

/// Also to ranks that share only a pair's meeting with this rank: they pass it on to theirs.
void PeerNews::announce(const Telling& telling) {
  try {
    for (const Meeting& meeting : communicators_->meetings()) {
      store_->set(progressKey(meeting, rank_), telling.progress);
      const std::string mine =
          telling.cause.empty() ? heard() : concat("rank ", rank_, ": ", telling.cause);
      const ToldFault first =
          writeFault(*store_, faultKey(meeting.instance), {ErrorKind::Backend, mine});
      // This rank's fault may only be a consequence of that one.
      const std::lock_guard<std::mutex> lock(mutex_);
      if (!telling.cause.empty() && first_.empty() &&
          first.text.rfind(concat("rank ", rank_, ": "), 0) != 0) {
        first_ = first.text;
      }
    }
  } catch (const std::exception& error) {
    log(LogLevel::Warn, concat("the store failed while a fault was reported: ", error.what()));
  }
}

void PeerNews::ask(const Telling& telling) {
  const auto until = deadlineAfter(Clock::now(), telling.patience);
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
    const std::lock_guard<std::mutex> lock(mutex_);
    trouble_ = concat(" (the store failed: ", error.what(), ")");
  }
}

/// Called under the lock.
std::string PeerNews::sentence() const {
  std::string text;
  std::vector<bool> told(progress_.size());
  for (const int rank : asked_) {
    const std::size_t at = rank;
    if (told[at]) continue;
    told[at] = true;
    text += concat(text.empty() ? ". " : "; ", "rank ", rank);
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
  const std::string before = first_.empty() ? "" : ". Reported before: " + first_;
  return before + text + trouble_;
}

}  // namespace fastcoll
