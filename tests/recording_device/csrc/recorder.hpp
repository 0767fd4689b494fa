// The order of all work on the devices: which thread launched it on which stream, and what it waits
// for.
//
// The launching thread does the work at once; only its order is modelled. Whether work has
// *finished* is modelled too. A test can hold a stream: later launches on it, and all work that
// waits for them, are unfinished until the test releases it.
#pragma once

#include <array>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <deque>
#include <mutex>
#include <string>
#include <vector>

#include "clock.hpp"
#include "host_thread.hpp"
#include "memory.hpp"

namespace recording {

struct Event {
  uint64_t id = 0;
  StreamIndex stream = -1;
  Clock clock;
  double milliseconds = 0;  // when it was recorded
};

struct LogEntry {
  std::string kind;  // launch, allocate, free, record, block, query, synchronize, record_stream,
                     // hold, release
  std::string what;  // the operator; for query the answer; for synchronize the kind of wait
  std::string stream;
  uint64_t event = 0;  // 0: none
  int thread = 0;      // host threads are numbered in the order of their first appearance
  std::vector<Touch> touches;
};

class Recorder {
 public:
  static Recorder& get();

  void launch(StreamIndex stream, const std::string& what, const std::vector<Access>& accesses);

  void record(Event& event, StreamIndex stream);
  void block(const Event& event, StreamIndex stream);
  bool query(const Event& event);
  void synchronize(const Event& event);
  bool queryStream(StreamIndex stream);
  void synchronizeStream(StreamIndex stream);
  void synchronizeDevice(int device);

  void allocate(void* address, size_t bytes, StreamIndex stream);
  // Returns the block's number of bytes.
  size_t free(void* address);
  void forget(const void* address);
  void recordStream(const void* address, StreamIndex stream);
  // The device whose memory this is; -1 for other memory.
  int deviceOf(const void* address);

  // For the C interface, whose callers may pass an invalid handle.
  void unknownStream(const void* handle, const std::string& what);

  // Work launched on the stream from now on is unfinished until the hold is released. Holds of one
  // stream may overlap, like queued kernels that each wait for other ranks.
  uint64_t hold(StreamIndex stream);
  void release(uint64_t hold);

  // While it is quiet it records and checks no kernels and events, and all of them have finished: a
  // call then costs the host little beside its own work.
  void setQuiet(bool quiet) { quiet_ = quiet; }
  bool isQuiet() const { return quiet_; }

  // Makes the waits of all other threads count for the calling thread.
  void joinThreads();
  void shareWithWorkers();

  std::vector<Violation> violations();
  std::vector<LogEntry> log();
  // Forgets violations, log and past accesses, and releases all holds.
  void clear();

 private:
  struct Hold {
    uint64_t id;
    StreamIndex stream;
    uint64_t last_finished;
  };
  using Lock = std::unique_lock<std::mutex>;
  static constexpr size_t kLongestLog = 1 << 20;
  // A host thread that waits longer for unfinished work gets an exception.
  static constexpr std::chrono::seconds kPatience{60};

  HostThread& host() { return HostThread::here(known_); }
  void learn(const Clock& clock);
  // Returns the stream's clock, merged with that of the calling thread.
  Clock& reach(StreamIndex stream);
  bool finished(const Clock& clock) const;
  void waitUntilFinished(Lock& lock, const Clock& clock, const std::string& what);
  Clock everything(int device) const;
  LogEntry& note(const char* kind, std::string what, StreamIndex stream, uint64_t event = 0);

  std::atomic<bool> quiet_{false};
  std::mutex mutex_;
  std::condition_variable released_;
  std::array<Clock, kStreams> streams_;
  Clock known_;  // merged clock of all host threads
  Memory memory_;
  std::deque<LogEntry> log_;
  bool log_is_cut_ = false;
  std::vector<Hold> holds_;
  uint64_t next_hold_ = 1;
  uint64_t next_event_ = 1;
};

}  // namespace recording
