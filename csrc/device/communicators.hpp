// The communicators of a group, as the library's own handles, so that the watchdog can ask for
// errors and abort them while another thread holds Python's lock for ever.
#pragma once

#include <atomic>
#include <cstdint>
#include <mutex>
#include <string>
#include <vector>

namespace fastcoll {

/// Addresses of the library's functions, of the types of nccl.h.
struct LibraryFunctions {
  std::uintptr_t commAbort = 0;          // int (comm)
  std::uintptr_t commGetAsyncError = 0;  // int (comm, int*)
  std::uintptr_t getErrorString = 0;     // const char* (int)
  std::uintptr_t groupStart = 0;         // int ()
  std::uintptr_t groupEnd = 0;           // int ()
};

/// Where ranks can tell each other of faults.
struct Meeting {
  std::string instance;  // equal on these ranks for this life of the group, and at no other time
  int peer = -1;         // the one other rank; -1: all of the group
};

class Communicators {
 public:
  explicit Communicators(LibraryFunctions functions) : functions_(functions) {}

  /// Shows a communicator to the watchdog; `name` is for messages, `peer` as in Meeting. False
  /// after abortAll(): then it is the caller's to abort.
  bool add(std::uintptr_t handle, std::string name, std::string instance, int peer);
  /// Called before the owner ends it; false when it was aborted, so that it must not be touched.
  bool remove(std::uintptr_t handle);
  /// Aborts all, and returns when the library does, which may be never. Those who add later, or
  /// look at aborted(), know at once.
  void abortAll() noexcept;
  /// Held while calls are made on them: an abort waits for it a moment, so that it frees nothing
  /// between two calls of a group, and no longer, so that it ends one that hangs.
  std::timed_mutex& calling() { return calling_; }
  bool aborted() const { return aborted_.load(std::memory_order_acquire); }
  /// What the library reports of one of them, or what was reported, or "".
  std::string asyncError() const;
  /// For the watchdog: an error that the library does not know of; the first one counts.
  void report(std::string text);
  /// The meetings of all that were ever added.
  std::vector<Meeting> meetings() const;

 private:
  struct One {
    std::uintptr_t handle;
    std::string name;
  };
  const LibraryFunctions functions_;
  std::atomic<bool> aborted_{false};
  std::timed_mutex calling_;
  mutable std::mutex mutex_;
  std::vector<One> all_;
  mutable std::mutex reportedMutex_;
  std::string reported_;
  mutable std::mutex meetingsMutex_;  // never held while the library is asked, which may hang
  std::vector<Meeting> meetings_;
};

}  // namespace fastcoll
