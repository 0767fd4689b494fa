// The trace of a process: its last collectives and messages, of all groups. It serves to find the
// rank that did something else. Each process has one, made with its first group; a forked child
// begins its own.
//
//   ring.hpp       the records, written without a lock or an allocation
//   trace.cpp      the rest of the state: groups, error texts, stacks
//   memory.cpp     where all of it lies, for other processes too
//   dump.cpp       a copy of the memory in a file
//   watcher.cpp    the thread that dumps when a group of this process has failed
#pragma once

#include <cstdint>
#include <exception>
#include <functional>
#include <string>
#include <vector>

#include "base/exported.hpp"
#include "base/settings.hpp"
#include "trace/memory.hpp"
#include "trace/record.hpp"

namespace fastcoll::trace {

struct Group {
  std::string name;
  std::string description;
  int rank = 0;
  std::vector<int> ranks;  // in the whole job, indexed by rank in the group
};

/// Makes the trace of this process by its settings; later calls change nothing.
void begin(const Settings& settings, const std::string& version);
/// This process's rank in the whole job, for the name of its dump.
void setRank(int rank);
/// Whether calls are recorded.
bool isOn();
/// Whether faults are dumped, by a thread that polls for failed groups.
FASTCOLL_EXPORTED bool isWatching();
/// Sets the reader of the caller's stack. It returns a line "name\tfile\tline" a frame, innermost
/// first.
void setStackReader(std::string (*reader)());

/// Adds a group. Returns the number for its records; 0 if nothing is recorded.
std::uint32_t addGroup(Group group);
/// Marks a group as ended. It is forgotten with its last record.
void endGroup(std::uint32_t group);

/// Completes the description of a call with the time and, if enabled, the caller's stack. Call it
/// before any lock, because it may need the interpreter. A description with group 0 is not
/// recorded.
void describe(Record& draft);
/// Records a described call under its sequence number; `starts`: it starts at once. Returns the
/// record's number; 0 if nothing is recorded. All functions below ignore 0.
RecordId record(const Record& draft, std::uint64_t seq, bool starts = false);
FASTCOLL_EXPORTED void start(RecordId id);
FASTCOLL_EXPORTED void complete(RecordId id, Digests digests = {});
/// Records the source and number of the message that a receive from any rank has found.
void setMessage(RecordId id, int source, std::uint64_t seq);
/// Where to count the waits for a host. `call`: a record of the group; `leader`: the host's, in the
/// group. nullptr if nothing is recorded, or if the group has more hosts than are counted.
HostWaits* waitsFor(RecordId call, int leader);
/// Counts a wait of `ranks` ranks for a host, unless `host` is nullptr.
class HostWait {
 public:
  HostWait(HostWaits* host, std::size_t ranks);
  ~HostWait();
  HostWait(const HostWait&) = delete;
  HostWait& operator=(const HostWait&) = delete;

 private:
  HostWaits* const host_;
  std::int64_t began_ = 0;
};
/// The call has failed; `groupFailed`: so has its group, and its first such call writes the dump,
/// if dumps are on.
void fail(RecordId id, const std::string& error, bool groupFailed = true) noexcept;
FASTCOLL_EXPORTED void fail(RecordId id, const std::exception_ptr& error,
                            bool groupFailed = true) noexcept;

/// A copy of the trace's memory. Empty if nothing is recorded.
std::string dump(const std::string& reason);
/// Writes the copy to `path`; if empty, the name is made of FASTCOLL_TRACE_DUMP and the rank.
/// Returns the name. Throws Error(Value) if it cannot be written.
FASTCOLL_EXPORTED std::string write(const std::string& reason, std::string path = "");

/// If faults are dumped, calls `failed` every 100 ms until unwatch(): the number of a group that
/// has failed because of another rank, or 0. It must not throw.
void watch(const void* owner, std::function<std::uint32_t()> failed);
void unwatch(const void* owner);
/// Ends the watcher, at exit. With FASTCOLL_DIGEST and FASTCOLL_TRACE_DUMP it first writes a dump,
/// unless a group has failed.
void end() noexcept;

}  // namespace fastcoll::trace
