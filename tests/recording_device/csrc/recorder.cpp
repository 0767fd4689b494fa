#include "recorder.hpp"

#include <dlfcn.h>

#include <chrono>
#include <stdexcept>
#include <utility>

#include "current.hpp"

namespace recording {
namespace {

double now() {
  using Milliseconds = std::chrono::duration<double, std::milli>;
  return Milliseconds(std::chrono::steady_clock::now().time_since_epoch()).count();
}

uintptr_t addressOf(const void* pointer) {
  return reinterpret_cast<uintptr_t>(pointer);
}

// As a driver's stand-in reports.
bool isCaptured(StreamIndex stream) {
  using Captures = int (*)(const void*);
  const auto captures = reinterpret_cast<Captures>(dlsym(RTLD_DEFAULT, "recordingDeviceCaptures"));
  return captures != nullptr && captures(handleOf(stream)) != 0;
}

}  // namespace

// Never destroyed: tensors may be freed when the process ends.
Recorder& Recorder::get() {
  static auto* recorder = new Recorder;
  return *recorder;
}

void Recorder::learn(const Clock& clock) {
  host().learn(clock);
  known_.merge(clock);
}

Clock& Recorder::reach(StreamIndex stream) {
  Clock& clock = streams_[static_cast<size_t>(stream)];
  clock.merge(host().clock());
  return clock;
}

LogEntry& Recorder::note(const char* kind, std::string what, StreamIndex stream, uint64_t event) {
  if (log_.size() == kLongestLog) {
    log_.pop_front();
    log_is_cut_ = true;
  }
  log_.push_back({kind, std::move(what), nameOf(stream), event, host().number(), {}});
  return log_.back();
}

void Recorder::launch(StreamIndex stream, const std::string& what,
                      const std::vector<Access>& accesses) {
  const Lock lock(mutex_);
  Clock& clock = reach(stream);
  clock.advance(stream);
  LogEntry& entry = note("launch", what, stream);
  for (const Access& access : accesses) {
    if (access.footprint.empty()) continue;
    memory_.access(access, stream, clock, what);
    const Range bounds = access.footprint.bounds();
    entry.touches.push_back(
        {what, entry.stream, bounds.begin, bounds.end - bounds.begin, access.write});
  }
}

void Recorder::record(Event& event, StreamIndex stream) {
  if (quiet_) return;
  const Lock lock(mutex_);
  if (event.id == 0) event.id = next_event_++;
  event.stream = stream;
  event.clock = reach(stream);
  event.milliseconds = now();
  note("record", "", stream, event.id);
}

void Recorder::block(const Event& event, StreamIndex stream) {
  if (quiet_) return;
  const Lock lock(mutex_);
  reach(stream).merge(event.clock);
  note("block", "", stream, event.id);
}

bool Recorder::query(const Event& event) {
  if (quiet_) return true;
  const Lock lock(mutex_);
  const bool done = finished(event.clock);
  if (done) learn(event.clock);
  const char* answer = done ? "finished" : "unfinished";
  // A thread that polls would fill the log.
  const bool again = !log_.empty() && log_.back().kind == "query" &&
                     log_.back().event == event.id && log_.back().what == answer;
  if (!again) note("query", answer, event.stream, event.id);
  return done;
}

void Recorder::synchronize(const Event& event) {
  Lock lock(mutex_);
  note("synchronize", "event", event.stream, event.id);
  waitUntilFinished(lock, Clock(event.clock), "an event of " + nameOf(event.stream));
}

bool Recorder::queryStream(StreamIndex stream) {
  const Lock lock(mutex_);
  const Clock& clock = streams_[static_cast<size_t>(stream)];
  const bool done = finished(clock);
  if (done) learn(clock);
  note("query", done ? "finished" : "unfinished", stream);
  return done;
}

void Recorder::synchronizeStream(StreamIndex stream) {
  if (isCaptured(stream)) {
    throw std::runtime_error("operation not permitted when stream is capturing");
  }
  Lock lock(mutex_);
  note("synchronize", "stream", stream);
  waitUntilFinished(lock, Clock(reach(stream)), nameOf(stream));
}

void Recorder::synchronizeDevice(int device) {
  Lock lock(mutex_);
  note("synchronize", "device", streamIndex(device, 0));
  waitUntilFinished(lock, everything(device), "device recording:" + std::to_string(device));
}

Clock Recorder::everything(int device) const {
  Clock clock;
  for (int id = 0; id < kStreamsPerDevice; ++id) {
    clock.merge(streams_[static_cast<size_t>(streamIndex(device, id))]);
  }
  return clock;
}

void Recorder::allocate(void* address, size_t bytes, StreamIndex stream) {
  const Lock lock(mutex_);
  memory_.allocate(addressOf(address), bytes, stream, reach(stream));
  LogEntry& entry = note("allocate", "", stream);
  entry.touches.push_back({"allocation", entry.stream, addressOf(address), bytes, true});
}

size_t Recorder::free(void* address) {
  const Lock lock(mutex_);
  const StreamIndex stream = memory_.streamOf(addressOf(address));
  if (stream < 0) return 0;
  const size_t bytes = memory_.bytesOf(addressOf(address));
  LogEntry& entry = note("free", "", stream);
  entry.touches.push_back({"free", entry.stream, addressOf(address), bytes, true});
  memory_.free(addressOf(address), reach(stream));
  return bytes;
}

void Recorder::forget(const void* address) {
  const Lock lock(mutex_);
  memory_.forget(addressOf(address));
}

void Recorder::recordStream(const void* address, StreamIndex stream) {
  const Lock lock(mutex_);
  LogEntry& entry = note("record_stream", "", stream);
  entry.touches.push_back({"record_stream", entry.stream, addressOf(address),
                           memory_.bytesOf(addressOf(address)), false});
  memory_.recordStream(addressOf(address), stream);
}

int Recorder::deviceOf(const void* address) {
  const Lock lock(mutex_);
  const StreamIndex stream = memory_.streamOf(addressOf(address));
  return stream < 0 ? -1 : recording::deviceOf(stream);
}

void Recorder::unknownStream(const void* handle, const std::string& what) {
  const Lock lock(mutex_);
  Violation violation{"unknown stream", "", {}, {}};
  violation.second = {what, nameOf(-1), addressOf(handle), 0, false};
  violation.text = what + " was launched on a handle that is no stream of this device";
  memory_.report(std::move(violation));
}

bool Recorder::finished(const Clock& clock) const {
  for (const Hold& hold : holds_) {
    if (clock[hold.stream] > hold.last_finished) return false;
  }
  return true;
}

void Recorder::waitUntilFinished(Lock& lock, const Clock& clock, const std::string& what) {
  if (!released_.wait_for(lock, kPatience, [&] { return finished(clock); })) {
    throw std::runtime_error("waited long for " + what +
                             ", which a test holds and did not release");
  }
  learn(clock);
}

uint64_t Recorder::hold(StreamIndex stream) {
  const Lock lock(mutex_);
  Clock& clock = reach(stream);
  holds_.push_back({next_hold_, stream, clock[stream]});
  clock.advance(stream);  // the work that does not finish, so later events wait for it
  note("hold", "", stream);
  return next_hold_++;
}

void Recorder::release(uint64_t hold) {
  const Lock lock(mutex_);
  for (auto it = holds_.begin(); it != holds_.end(); ++it) {
    if (it->id != hold) continue;
    note("release", "", it->stream);
    holds_.erase(it);
    break;
  }
  released_.notify_all();
}

void Recorder::joinThreads() {
  const Lock lock(mutex_);
  host().learn(known_);
}

void Recorder::shareWithWorkers() {
  const Lock lock(mutex_);
  HostThread::shareWithWorkers();
}

std::vector<Violation> Recorder::violations() {
  const Lock lock(mutex_);
  return memory_.violations();
}

std::vector<LogEntry> Recorder::log() {
  const Lock lock(mutex_);
  if (log_is_cut_) throw std::runtime_error("the log has grown too long: call clear() before");
  return {log_.begin(), log_.end()};
}

void Recorder::clear() {
  const Lock lock(mutex_);
  memory_.clear();
  log_.clear();
  log_is_cut_ = false;
  holds_.clear();
  released_.notify_all();
}

}  // namespace recording
