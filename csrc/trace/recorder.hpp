// The trace itself, shared by trace.cpp, dump.cpp and watcher.cpp.
#pragma once

#include <atomic>
#include <map>
#include <mutex>
#include <string>
#include <unordered_map>
#include <vector>

#include "trace/ring.hpp"
#include "trace/ticks.hpp"
#include "trace/trace.hpp"

namespace fastcoll::trace {

/// How far a failed group was dumped: not at all, when the failure was noticed, or once more when a
/// call of this rank met it.
enum class Dumped : int { No, Noticed, Met };

struct KnownGroup {
  std::string json;
  std::vector<int> ranks;  // in the whole job
  RecordId endedAt = 0;    // the last record when the group ended; 0: it has not
  Dumped dumped = Dumped::No;
};

struct Recorder {
  /// `version`: of fastcoll.
  Recorder(const Settings& settings, const std::string& version, std::uint64_t forkGeneration);

  const std::uint64_t generation;
  const Ticks ticks;
  Ring ring;
  const bool stacks;
  const std::string dumpPrefix;  // empty: no automatic dumps
  const bool dumpsAtEnd;
  std::int64_t rank() { return ring.memory().header().rank.load(std::memory_order_relaxed); }
  std::atomic<RecordId> nextMoment{0};  // the record that gets its time by both clocks

  // Guards the rest, and the texts in the memory. Held for moments only, and no other lock is taken
  // under it.
  std::mutex mutex;
  std::map<std::uint32_t, KnownGroup> groups;
  std::map<RecordId, std::string> errors;
  std::uint32_t lastGroup = 0;
  std::unordered_map<std::string, std::uint32_t> stackPlaces;
  /// Writes groups and errors to the memory. Call it under the lock, after they have changed.
  void publish();

  std::mutex fileMutex;  // one dump at a time

 private:
  const std::string head_;  // of the JSON
};

/// The trace of this process; nullptr if there is none. It is never destroyed.
Recorder* recorder();
/// Writes the dump and logs its path, or why it could not be written.
void dumpByItself(const std::string& reason) noexcept;
/// The group has failed because of another rank.
void groupFailed(std::uint32_t group) noexcept;
void startWatcher();
void stopWatching() noexcept;

}  // namespace fastcoll::trace
