// Threads of the library's own: signals are for the program's threads, so these block all of them.
#pragma once

#include <signal.h>

#include <thread>
#include <utility>

namespace fastcoll {

/// Starts a thread that no signal is delivered to. Throws std::system_error if there is no room.
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
