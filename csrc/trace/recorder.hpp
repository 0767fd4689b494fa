// What trace.cpp, dump.cpp and watcher.cpp share: the trace itself.
#pragma once

#include <atomic>
#include <map>
#include <mutex>
#include <string>
#include <unordered_map>
#include <vector>

#include "ring.hpp"
#include "ticks.hpp"
#include "trace.hpp"

namespace fastcoll::trace {

/// The number of "USR1"; 0 of "none".
int signalOf(const std::string& name);

/// How far the dump of a failed group has got: what was written when the failure was noticed is
/// written once more when a call of this rank has met it.
enum class Dumped : int { No, Noticed, Met };

struct KnownGroup {
  Group group;
  int instance = 0;      // which of the groups of this name, from 0
  RecordId endedAt = 0;  // the last record when it ended, 0: it lives
  Dumped dumped = Dumped::No;
};

struct Recorder {
  Recorder(const Settings& settings, std::string ours, std::uint64_t forkGeneration)
      : generation(forkGeneration),
        version(std::move(ours)),
        ring(settings.traceSize),
        stacks(settings.traceStacks),
        dumpPrefix(settings.traceDump),
        signal(signalOf(settings.traceSignal)) {}

  const std::uint64_t generation;
  const std::string version;  // of fastcoll
  const Ticks ticks;
  Ring ring;
  const bool stacks;
  const std::string dumpPrefix;  // empty: nothing is dumped by itself
  std::string prefix() const { return dumpPrefix.empty() ? kDefaultTraceDump : dumpPrefix; }
  const int signal;  // 0: none

  // Everything below is for calls that fail, groups, stacks and dumps. It is held for moments only,
  // and nothing else is taken while it is.
  std::mutex mutex;
  std::map<std::uint32_t, KnownGroup> groups;
  std::uint32_t lastGroup = 0;
  std::map<std::string, int> instances;  // groups made of each name
  int rank = 0;                          // of the whole job
  std::map<RecordId, std::string> errors;
  std::unordered_map<std::string, std::uint32_t> stackNumbers;
  std::vector<const std::string*> stackTexts;  // by number, from 1

  std::mutex fileMutex;  // one dump at a time
};

/// The trace of this process; nullptr when there is none. It lives for ever.
Recorder* recorder();
/// Writes the dump and says where it is, or why it could not be written.
void dumpByItself(const std::string& reason) noexcept;
void startWatcher(Recorder& recorder);

}  // namespace fastcoll::trace
