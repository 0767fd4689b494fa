#include "host_thread.hpp"

#include <c10/util/ThreadLocalDebugInfo.h>

#include <memory>

namespace recording {
namespace {

thread_local HostThread this_thread;
int threads = 0;

struct Shared : c10::DebugInfoBase {
  Clock clock;
};

Shared* shared() {
  return dynamic_cast<Shared*>(c10::ThreadLocalDebugInfo::get(c10::DebugInfoKind::TEST_INFO));
}

}  // namespace

HostThread& HostThread::here(const Clock& known) {
  if (this_thread.number_ < 0) {
    this_thread.number_ = threads++;
    this_thread.clock_ = known;
  }
  return this_thread;
}

const Clock& HostThread::clock() {
  if (const Shared* with = shared()) clock_.merge(with->clock);
  return clock_;
}

void HostThread::learn(const Clock& clock) {
  clock_.merge(clock);
  if (Shared* with = shared()) with->clock.merge(clock);
}

// Never popped: entries that were pushed on top of it could not be popped first.
void HostThread::shareWithWorkers() {
  if (shared() == nullptr) {
    c10::ThreadLocalDebugInfo::_push(c10::DebugInfoKind::TEST_INFO, std::make_shared<Shared>());
  }
}

}  // namespace recording
