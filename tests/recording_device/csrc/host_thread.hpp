// What host threads know of the streams' work.
#pragma once

#include "clock.hpp"

namespace recording {

// The calling thread's part of this. Only under the lock of the recorder.
class HostThread {
 public:
  // Threads are numbered in the order of their first call. `known` is what any thread knows: who
  // started a thread cannot be told, and any other's knowledge may have been passed on to it.
  static HostThread& here(const Clock& known);

  int number() const { return number_; }
  // With what the thread knows that this one works for.
  const Clock& clock();
  void learn(const Clock& clock);

  // From now on the threads that work for the calling one, to which torch hands its thread-local
  // state, share what it knows: autograd's run the backward of whoever called it.
  static void shareWithWorkers();

 private:
  int number_ = -1;
  Clock clock_;
};

}  // namespace recording
