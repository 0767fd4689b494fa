#include "trace/trace.hpp"

#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <utility>

#include "base/error.hpp"
#include "base/fork.hpp"
#include "base/log.hpp"
#include "base/topology.hpp"
#include "base/utf8.hpp"
#include "trace/recorder.hpp"

namespace fastcoll::trace {
namespace {

std::atomic<Recorder*> current{nullptr};
std::atomic<std::string (*)()> stackReader{nullptr};

// Limit on kept error texts. That on stacks is the room in the memory.
constexpr std::size_t kErrors = 256;
// Every so many records at most, one gets its time by CLOCK_MONOTONIC too.
constexpr RecordId kMoments = 512;

std::uint32_t placeOfStack(Recorder& all) {
  const auto reader = stackReader.load(std::memory_order_acquire);
  if (reader == nullptr) return 0;
  std::string text = reader();  // takes the GIL, so before the lock
  if (text.empty()) return 0;
  const std::lock_guard<std::mutex> lock(all.mutex);
  const auto found = all.stackPlaces.find(text);
  if (found != all.stackPlaces.end()) return found->second;
  const std::uint32_t place = all.ring.memory().add(validUtf8(text));
  if (place != 0) all.stackPlaces.emplace(std::move(text), place);
  return place;
}

/// A text as JSON has it. Bytes that are not UTF-8 are written as '?'.
std::string quoted(const std::string& text) {
  std::string json = "\"";
  for (const char c : validUtf8(text)) {
    if (c == '"' || c == '\\') json += '\\';
    const bool control = static_cast<unsigned char>(c) < 0x20;
    json += control ? (c == '\n' ? "\\n" : c == '\t' ? "\\t" : "?") : std::string(1, c);
  }
  return json + '"';
}

/// What is the same in all states: names of what records have as numbers.
std::string names() {
  const std::vector<const char*> calls{
#define CALL(id, name, collective, type, title, traced, ...) traced,
#include "base/collectives.def"
  };
  std::vector<DType> dtypes;
  std::vector<ReduceOp> ops;
  for (int i = 0; i <= int(DType::Opaque); ++i) dtypes.push_back(DType(i));
  for (int i = 0; i <= int(ReduceOp::None); ++i) ops.push_back(ReduceOp(i));
  const auto dtype = [](DType one) { return quoted(dtypeName(one)); };
  const auto op = [](ReduceOp one) { return quoted(reduceOpName(one)); };
  return concat("\"calls\":[", listOf(calls, quoted, ","), "],\"dtypes\":[",
                listOf(dtypes, dtype, ","), "],\"bytes\":[", listOf(dtypes, elementSize, ","),
                "],\"ops\":[", listOf(ops, op, ","), "]");
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
        recorder()->dumpPrefix, "` to compare those of all ranks.");
  } catch (const std::exception& error) {
    log(LogLevel::Warn, error.what());
  }
}

Recorder* recorder() {
  Recorder* const all = current.load(std::memory_order_acquire);
  return all != nullptr && all->generation == forkGeneration() ? all : nullptr;
}

Recorder::Recorder(const Settings& settings, const std::string& version,
                   std::uint64_t forkGeneration)
    : generation(forkGeneration),
      ring(settings.traceSize),
      stacks(settings.traceStacks),
      dumpPrefix(settings.traceDump),
      dumpsAtEnd(!dumpPrefix.empty() && settings.digestsOf() != DigestsOf::Nothing),
      head_(concat("{\"version\":", quoted(version), ",\"host\":", quoted(hostName()),
                   ",\"stacks\":", stacks ? "true" : "false", ",", names(), ",\"groups\":{")) {
  Header& header = ring.memory().header();
  header.firstTicks = ticks.now();
  header.firstNanos = steadyNanos();
}

void Recorder::publish() {
  const auto group = [](const auto& known) { return known.second.json; };
  const auto error = [](const auto& one) {
    return concat('"', one.first, "\":", quoted(one.second));
  };
  ring.memory().setJson(concat(head_, listOf(groups, group, ","), "},\"errors\":{",
                               listOf(errors, error, ","), "}}"));
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
  if (!made->dumpPrefix.empty()) startWatcher();
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
  all->ring.memory().header().rank.store(rank, std::memory_order_relaxed);
}

std::uint32_t addGroup(Group group) {
  Recorder* const all = recorder();
  if (all == nullptr) return 0;
  const std::lock_guard<std::mutex> lock(all->mutex);
  forgetGroups(*all);
  const std::uint32_t number = ++all->lastGroup;
  all->groups[number].json =
      concat('"', number, "\":{\"name\":", quoted(group.name),
             ",\"description\":", quoted(group.description), ",\"rank\":", group.rank,
             ",\"ranks\":[", listOf(group.ranks, std::identity(), ","), "]}");
  all->groups[number].ranks = std::move(group.ranks);
  all->publish();
  return number;
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
  if (all->stacks) draft.stack = placeOfStack(*all);
  draft.created = all->ticks.now();
  draft.nanos = 0;
  const RecordId last = all->ring.last();
  if (last < all->nextMoment.load(std::memory_order_relaxed)) return;
  all->nextMoment.store(last + std::min({last + 1, kMoments, all->ring.size() / 4 + 1}),
                        std::memory_order_relaxed);
  draft.nanos = steadyNanos();
}

RecordId record(const Record& draft, std::uint64_t seq, bool starts) {
  Recorder* const all = draft.group == 0 ? nullptr : recorder();
  return all == nullptr ? 0 : all->ring.add(draft, seq, starts);
}

// A forked child has works of its parent, but not the parent's memory.
void start(RecordId id) {
  Recorder* const all = id == 0 ? nullptr : recorder();
  if (all != nullptr) all->ring.start(id, all->ticks.now());
}

void complete(RecordId id, Digests digests) {
  Recorder* const all = id == 0 ? nullptr : recorder();
  if (all != nullptr) all->ring.end(id, State::Completed, all->ticks.now(), digests);
}

void setMessage(RecordId id, int source, std::uint64_t seq) {
  Recorder* const all = id == 0 ? nullptr : recorder();
  if (all != nullptr) all->ring.setMessage(id, source, seq);
}

HostWaits* waitsFor(RecordId call, int leader) {
  Recorder* const all = call == 0 ? nullptr : recorder();
  if (all == nullptr) return nullptr;
  const std::lock_guard<std::mutex> lock(all->mutex);
  const auto group = all->groups.find(all->ring.groupOf(call));
  if (group == all->groups.end()) return nullptr;  // the record has been overwritten
  const std::uint64_t name = group->second.ranks[leader] + std::uint64_t{1};
  for (HostWaits& host : all->ring.memory().header().hosts) {
    if (host.leader == 0) host.leader.store(name, std::memory_order_release);
    if (host.leader == name) return &host;
  }
  return nullptr;
}

// A forked child does not have the memory.
HostWait::HostWait(HostWaits* host, std::size_t ranks)
    : host_(host != nullptr && recorder() != nullptr ? host : nullptr) {
  if (host_ == nullptr) return;
  began_ = recorder()->ticks.now();
  host_->ranks.store(static_cast<std::int64_t>(ranks), std::memory_order_relaxed);
  host_->since.store(began_, std::memory_order_release);
}

HostWait::~HostWait() {
  if (host_ == nullptr) return;
  const std::int64_t waited = recorder()->ticks.now() - began_;
  host_->ticks.fetch_add(waited * host_->ranks.load(std::memory_order_relaxed),
                         std::memory_order_relaxed);
  host_->since.store(0, std::memory_order_release);
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
      all.publish();
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

void end() noexcept {
  Recorder* const all = recorder();
  stopWatching();
  if (all == nullptr || !all->dumpsAtEnd || all->ring.last() == 0) return;
  try {
    {
      const std::lock_guard<std::mutex> lock(all->mutex);
      const auto dumped = [](const auto& known) { return known.second.dumped != Dumped::No; };
      if (std::ranges::any_of(all->groups, dumped)) return;
    }
    write("the program ended");
  } catch (const std::exception& error) {
    log(LogLevel::Warn, error.what());
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
