// The library's own threads. They block all signals, which belong to the program's threads.
#pragma once

#include <signal.h>

#include <thread>
#include <utility>

namespace fastcoll {

/// Starts a thread that blocks all signals. Throws std::system_error if the system has no room.
template <typename Body>
std::thread startThread(Body&& body) {
  struct Masked {
    sigset_t before;
    Masked() {
      sigset_t all;
      sigfillset(&all);
      ::pthread_sigmask(SIG_SETMASK, &all, &before);
    }
    ~Masked() { ::pthread_sigmask(SIG_SETMASK, &before, nullptr); }
  } masked;
  return std::thread(std::forward<Body>(body));
}

}  // namespace fastcoll
