// The clocks of host threads: which work of the streams is ordered before them.
#pragma once

#include "clock.hpp"

namespace recording {

// The calling thread's clock. Use it only under the recorder's lock.
class HostThread {
 public:
  // Threads are numbered in the order of their first call. `known` is the merged clock of all
  // threads. A new thread begins with it, because its starter is unknown and may be any thread.
  static HostThread& here(const Clock& known);

  int number() const { return number_; }
  // Includes the clock of the thread that this one works for.
  const Clock& clock();
  void learn(const Clock& clock);

  // From now on the calling thread shares its clock with threads that work for it, to which torch
  // passes its thread-local state: autograd's threads run the backward of their caller.
  static void shareWithWorkers();

 private:
  int number_ = -1;
  Clock clock_;
};

}  // namespace recording
