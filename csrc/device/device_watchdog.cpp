// The watchdog of a DeviceEngine: one thread a group, from its first call on. It never takes
// Python's lock, which a thread that hangs may hold.
//
// It asks the events of what is under way; looks at deadlines and at what the library says of
// itself; and once a second at the store, for a fault that another rank met. A fault ends the group
// on all ranks, with a message that says how far each rank came.
#include <pthread.h>

#include <algorithm>

#include "../base/env.hpp"
#include "../base/thread.hpp"
#include "device_engine.hpp"

namespace fastcoll {
namespace {

constexpr Milliseconds kStoreTick{1000};
// How long the rank that met a fault waits for the others to say how far they are.
constexpr Milliseconds kAnswer{2500};
constexpr Milliseconds kPoll{50};

// Keys begin with the instance: a store may hold those of an earlier life of the group.
std::string faultKey(const std::string& instance) {
  return instance + "/fault";
}
std::string progressKey(const std::string& instance, int rank) {
  return concat(instance, "/progress/", rank);
}

}  // namespace

/// Called under the lock.
void DeviceEngine::startWatching() {
  if (watchdog_.joinable()) return;
  watchdog_ = startThread([this] { watch(); });
}

void DeviceEngine::watch() noexcept {
  ::pthread_setname_np(::pthread_self(), "fastcoll-dog");
  auto lookAtStore = Clock::now() + kStoreTick;
  std::unique_lock<std::mutex> lock(mutex_);
  while (!closed_) {
    changed_.wait_for(lock, config_.tick);
    if (closed_) return;
    const bool failed = failed_;
    lock.unlock();
    if (!failed) {
      lookAtFlights();
      if (Clock::now() >= lookAtStore) {
        lookAtStore = Clock::now() + kStoreTick;
        const std::string heard = heardFromPeers();
        if (!heard.empty()) abort(ErrorKind::Backend, heard);
      }
    }
    lock.lock();
  }
}

void DeviceEngine::lookAtFlights() {
  std::vector<FlightRef> ended;
  FlightRef late;
  try {
    const std::lock_guard<std::mutex> lock(mutex_);
    const auto now = Clock::now();
    for (auto it = flights_.begin(); it != flights_.end();) {
      if ((*it)->ended()) {
        completed_ = std::max(completed_, (*it)->seq);
        if ((*it)->keeps()) toFree_.push_back(*it);
        it = flights_.erase(it);
        continue;
      }
      if (late == nullptr && now >= (*it)->deadline) late = *it;
      ++it;
    }
    if (flights_.empty()) changed_.notify_all();
  } catch (const std::exception& error) {
    // The device itself reports an error: of a kernel, or of the card.
    const std::string cause = concat("the device reported an error: ", error.what());
    tellPeers(cause);
    abort(ErrorKind::Backend, cause);
    return;
  }
  const std::string fault = issuer_->poll();
  if (!fault.empty()) {
    tellPeers(fault);
    abort(ErrorKind::Backend, fault + whereAllAre());
  } else if (late != nullptr) {
    const std::string cause =
        concat(late->describe(), " timed out after ", late->timeout.count(), " ms");
    tellPeers(cause);
    abort(ErrorKind::Timeout, cause + whereAllAre());
  }
}

void DeviceEngine::tellPeers(const std::string& cause) noexcept {
  log(LogLevel::Warn, concat("group '", config_.name, "', rank ", config_.rank, "/", config_.size,
                             ": ", cause, "; the group is aborted"));
  try {
    std::string progress;
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      progress = concat(completed_, " ", sequence_, " ",
                        flights_.empty() ? "nothing" : flights_.front()->describe());
    }
    const std::string instance = issuer_->instance();
    if (instance.empty()) return;
    store_->set(progressKey(instance, config_.rank), progress);
    std::string known;
    if (!store_->tryGet(faultKey(instance), known)) {
      store_->set(faultKey(instance), concat("rank ", config_.rank, ": ", cause));
    }
  } catch (const std::exception& error) {
    log(LogLevel::Warn, concat("the store failed while a fault was told: ", error.what()));
  }
}

std::string DeviceEngine::heardFromPeers() noexcept {
  try {
    const std::string instance = issuer_->instance();
    std::string fault;
    if (instance.empty() || !store_->tryGet(faultKey(instance), fault)) return "";
    tellPeers("a peer met a fault");
    return "another rank met a fault: " + fault + whereAllAre();
  } catch (const std::exception&) {
    return "";  // the store may end before the group does
  }
}

/// Each rank's progress as it tells it in the store, as the end of a sentence.
std::string DeviceEngine::whereAllAre() noexcept {
  std::string text;
  try {
    const std::string instance = issuer_->instance();
    if (instance.empty()) return text;
    const auto until = Clock::now() + kAnswer;
    std::vector<std::string> of(static_cast<std::size_t>(config_.size));
    std::size_t missing = of.size();
    while (missing > 0) {
      for (std::size_t rank = 0; rank < of.size(); ++rank) {
        if (of[rank].empty() &&
            store_->tryGet(progressKey(instance, static_cast<int>(rank)), of[rank])) {
          --missing;
        }
      }
      if (missing == 0 || Clock::now() >= until) break;
      std::this_thread::sleep_for(kPoll);
    }
    for (std::size_t rank = 0; rank < of.size(); ++rank) {
      text += concat(rank == 0 ? ". " : "; ", "rank ", rank);
      if (of[rank].empty()) {
        text += " does not answer";
        continue;
      }
      std::istringstream parts(of[rank]);
      std::string completed;
      std::string issued;
      std::string under;
      parts >> completed >> issued;
      std::getline(parts >> std::ws, under);
      text += concat(" completed call ", completed, " of ", issued, ", under way: ", under);
    }
  } catch (const std::exception& error) {
    text += concat(" (the store failed: ", error.what(), ")");
  }
  return text;
}

}  // namespace fastcoll
