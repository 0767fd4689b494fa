// The communicators of a group, as the library's own handles, so that the watchdog can ask for
// errors and abort them while another thread holds Python's lock for ever.
#pragma once

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
};

class Communicators {
 public:
  explicit Communicators(LibraryFunctions functions) : functions_(functions) {}

  /// `name`: for messages. After abortAll() it is aborted at once.
  void add(std::uintptr_t handle, std::string name);
  /// Called before the owner ends it; false when it was aborted, so that it must not be touched.
  bool remove(std::uintptr_t handle);
  void abortAll() noexcept;
  bool aborted() const;
  /// What the library reports of one of them, or "".
  std::string asyncError();
  /// A text that is equal on all ranks of this life of the group, and of no other; "" while
  /// unknown.
  std::string instance() const;
  void setInstance(std::string instance);

 private:
  struct One {
    std::uintptr_t handle;
    std::string name;
  };
  const LibraryFunctions functions_;
  mutable std::mutex mutex_;
  std::vector<One> all_;
  bool aborted_ = false;
  std::string instance_;
};

}  // namespace fastcoll
