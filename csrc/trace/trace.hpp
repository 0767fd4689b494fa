// The trace of a process: its last collectives and messages, whatever their group, for whoever has
// to find out which rank did something else. One for the process, made with its first group; a
// forked child begins its own.
//
//   ring.hpp       the records, written without a lock or an allocation
//   trace.cpp      what is beside the ring: groups, error texts, stacks
//   dump.cpp       all of it in the format of torch's flight recorder
//   watcher.cpp    the thread that dumps on a signal, and when a group of this process has failed
#pragma once

#include <cstdint>
#include <exception>
#include <functional>
#include <string>
#include <vector>

#include "../base/settings.hpp"
#include "record.hpp"

namespace fastcoll::trace {

/// Where dumps go that are asked for by a signal while FASTCOLL_TRACE_DUMP is not set.
constexpr const char* kDefaultTraceDump = "/tmp/fastcoll_trace_";

struct Group {
  std::string name;
  std::string description;
  int rank = 0;
  std::vector<int> ranks;  // of the whole job, by rank in the group
};

/// Makes the trace of this process as the environment says; later calls change nothing.
void begin(const Settings& settings, const std::string& version);
/// This process's rank in the whole job, for the name of its dump.
void setRank(int rank);
/// Whether calls are recorded.
bool isOn();
/// Whether there is a thread that has to hear of failed groups.
bool isWatching();
/// Sets what returns the caller's stack, innermost frame first, a line "name\tfile\tline" each.
void setStackReader(std::string (*reader)());

/// The number that the group's records name; 0 when nothing is recorded.
std::uint32_t addGroup(Group group);
/// The group has ended: it is forgotten with its last record.
void endGroup(std::uint32_t group);

/// Completes the description of a call with the time and, if asked for, the caller's stack: before
/// any lock is taken, for it may need the interpreter. A description with group 0 is not recorded.
void describe(Record& draft);
/// Records a described call under its number; `starts`: it starts where it was made. Returns the
/// record's number, 0 when nothing is recorded. All functions below ignore 0.
RecordId record(const Record& draft, std::uint64_t seq, bool starts = false);
void start(RecordId id);
void complete(RecordId id);
/// A receive from any rank has found its message.
void setMessage(RecordId id, int source, std::uint64_t seq);
/// The call has failed, and the group with it unless it is said otherwise: then the first such call
/// writes the dump, if one is asked for.
void fail(RecordId id, const std::string& error, bool groupFailed = true) noexcept;
void fail(RecordId id, const std::exception_ptr& error, bool groupFailed = true) noexcept;
/// The group has failed, by what another rank did.
void groupFailed(std::uint32_t group) noexcept;

/// The dump as torch's analyser reads it: a pickle. Empty when nothing is recorded.
std::string dump(const std::string& reason);
/// Writes the dump to a file whose name is complete, or made of FASTCOLL_TRACE_DUMP and the rank.
/// Returns the name. Throws Error(Value) if it cannot be written.
std::string write(const std::string& reason, std::string path = "");

/// Called by the watcher now and then; returns nothing, throws nothing.
void setLook(std::function<void()> look);
/// Ends the watcher, at exit.
void stopWatching() noexcept;

}  // namespace fastcoll::trace
