#include "trace/trace.hpp"

#include <unistd.h>

#include <cerrno>
#include <cstring>

#include "base/error.hpp"
#include "base/fork.hpp"
#include "base/log.hpp"
#include "trace/recorder.hpp"

namespace fastcoll::trace {
namespace {

std::atomic<Recorder*> current{nullptr};
std::atomic<std::string (*)()> stackReader{nullptr};

// Limits on kept stacks and error texts. A program has few places that communicate.
constexpr std::size_t kStacks = 1 << 14;
constexpr std::size_t kErrors = 256;

std::uint32_t numberOfStack(Recorder& all) {
  const auto reader = stackReader.load(std::memory_order_acquire);
  if (reader == nullptr) return 0;
  std::string text = reader();  // takes the GIL, so before the lock
  if (text.empty()) return 0;
  const std::lock_guard<std::mutex> lock(all.mutex);
  const auto found = all.stackNumbers.find(text);
  if (found != all.stackNumbers.end()) return found->second;
  if (all.stackTexts.size() >= kStacks) return 0;
  const auto number = static_cast<std::uint32_t>(all.stackTexts.size() + 1);
  const auto place = all.stackNumbers.emplace(std::move(text), number).first;
  all.stackTexts.push_back(&place->first);
  return number;
}

/// Forgets groups that ended before the oldest record was made. Call it under the lock.
void forgetGroups(Recorder& all) {
  std::erase_if(all.groups, [&](const auto& group) {
    const RecordId ended = group.second.endedAt;
    return ended != 0 && ended + all.ring.size() < all.ring.last();
  });
}

/// True if the group's dump is to be written now.
bool mustDump(Recorder& all, std::uint32_t group, Dumped how) {
  if (all.dumpPrefix.empty()) return false;
  const std::lock_guard<std::mutex> lock(all.mutex);
  const auto found = all.groups.find(group);
  if (found == all.groups.end() || found->second.dumped >= how) return false;
  found->second.dumped = how;
  return true;
}

/// Warns at the start if dumps cannot be written: a warning at the first dump would be too late.
void checkFolder(const std::string& prefix) {
  if (prefix.empty()) return;
  const std::size_t slash = prefix.rfind('/');
  const std::string folder = slash == std::string::npos ? "." : prefix.substr(0, slash + 1);
  if (::access(folder.c_str(), W_OK | X_OK) == 0) return;
  const int why = errno;
  log(LogLevel::Warn, "FASTCOLL_TRACE_DUMP=", prefix, ": no trace can be written to ", folder, ": ",
      std::strerror(why), ". Make this folder, or name another.");
}

}  // namespace

void dumpByItself(const std::string& reason) noexcept {
  try {
    const std::string path = write(reason);
    log(LogLevel::Warn, "trace written to ", path, " (", reason, "). Run `fastcoll trace ",
        recorder()->prefix(), "` to compare those of all ranks.");
  } catch (const std::exception& error) {
    log(LogLevel::Warn, error.what());
  }
}

Recorder* recorder() {
  Recorder* const all = current.load(std::memory_order_acquire);
  return all != nullptr && all->generation == forkGeneration() ? all : nullptr;
}

void begin(const Settings& settings, const std::string& version) {
  Recorder* before = current.load(std::memory_order_acquire);
  if (settings.traceSize == 0 || (before != nullptr && before->generation == forkGeneration()))
    return;
  auto* const made =
      new Recorder(settings, version, forkGeneration());  // outlives static destructors
  // A child continues its parent's group numbers, so a number never means two groups.
  if (before != nullptr) made->lastGroup = before->lastGroup;
  if (!current.compare_exchange_strong(before, made)) {
    delete made;
    return;
  }
  checkFolder(made->dumpPrefix);
  if (!made->dumpPrefix.empty() || made->signal != 0) startWatcher(*made);
}

bool isOn() {
  return recorder() != nullptr;
}

bool isWatching() {
  const Recorder* const all = recorder();
  return all != nullptr && !all->dumpPrefix.empty();
}

void setStackReader(std::string (*reader)()) {
  stackReader.store(reader, std::memory_order_release);
}

void setRank(int rank) {
  Recorder* const all = recorder();
  if (all == nullptr) return;
  const std::lock_guard<std::mutex> lock(all->mutex);
  all->rank = rank;
}

std::uint32_t addGroup(Group group) {
  Recorder* const all = recorder();
  if (all == nullptr) return 0;
  const std::lock_guard<std::mutex> lock(all->mutex);
  forgetGroups(*all);
  KnownGroup known;
  known.instance = all->instances[group.name]++;
  known.group = std::move(group);
  all->groups.emplace(++all->lastGroup, std::move(known));
  return all->lastGroup;
}

void endGroup(std::uint32_t group) {
  Recorder* const all = recorder();
  if (all == nullptr || group == 0) return;
  const std::lock_guard<std::mutex> lock(all->mutex);
  const auto found = all->groups.find(group);
  if (found != all->groups.end()) found->second.endedAt = all->ring.last();
}

void describe(Record& draft) {
  Recorder* const all = recorder();
  if (all == nullptr) {
    draft.group = 0;
    return;
  }
  if (all->stacks) draft.stack = numberOfStack(*all);
  draft.created = all->ticks.now();
}

RecordId record(const Record& draft, std::uint64_t seq, bool starts) {
  if (draft.group == 0) return 0;
  return current.load(std::memory_order_acquire)->ring.add(draft, seq, starts);
}

// This process's own trace made the number, so `current` needs no check of its generation.
void start(RecordId id) {
  if (id == 0) return;
  Recorder& all = *current.load(std::memory_order_acquire);
  all.ring.start(id, all.ticks.now());
}

void complete(RecordId id) {
  if (id == 0) return;
  Recorder& all = *current.load(std::memory_order_acquire);
  all.ring.end(id, State::Completed, all.ticks.now());
}

void setMessage(RecordId id, int source, std::uint64_t seq) {
  if (id != 0) current.load(std::memory_order_acquire)->ring.setMessage(id, source, seq);
}

void fail(RecordId id, const std::string& error, bool groupFailed) noexcept {
  if (id == 0) return;
  try {
    Recorder* const mine = recorder();
    if (mine == nullptr) return;
    Recorder& all = *mine;
    all.ring.end(id, State::Failed, all.ticks.now());
    {
      const std::lock_guard<std::mutex> lock(all.mutex);
      // The first errors matter most. Errors of overwritten records are dropped.
      const RecordId last = all.ring.last();
      const RecordId oldest = last > all.ring.size() ? last - all.ring.size() : 0;
      all.errors.erase(all.errors.begin(), all.errors.lower_bound(oldest));
      if (all.errors.size() < kErrors) all.errors[id] = error;
    }
    if (all.dumpPrefix.empty() || !groupFailed) return;
    const auto group = all.ring.groupOf(id);
    if (mustDump(all, group, Dumped::Met)) dumpByItself("a call failed");
  } catch (...) {
    log(LogLevel::Warn, "the trace could not record a failed call");
  }
}

void fail(RecordId id, const std::exception_ptr& error, bool groupFailed) noexcept {
  if (id == 0) return;
  try {
    std::rethrow_exception(error);
  } catch (const std::exception& known) {
    fail(id, known.what(), groupFailed);
  } catch (...) {
    fail(id, "interrupted", groupFailed);
  }
}

void groupFailed(std::uint32_t group) noexcept {
  try {
    Recorder* const all = recorder();
    if (all == nullptr || group == 0) return;
    if (mustDump(*all, group, Dumped::Noticed)) dumpByItself("a group failed");
  } catch (...) {
    log(LogLevel::Warn, "the trace could not be written");
  }
}

}  // namespace fastcoll::trace
