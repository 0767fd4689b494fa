#include "device_engine.hpp"

#include <c10/core/DeviceGuard.h>

#include <algorithm>
#include <iterator>
#include <set>
#include <utility>

#include "../base/env.hpp"
#include "../base/fork.hpp"
#include "../base/thread.hpp"

namespace fastcoll {
namespace {

// What is under way when nobody is left to wait for it.
constexpr Milliseconds kShortGrace{1000};
constexpr Milliseconds kLongest = std::chrono::hours(24 * 365);

struct Living {
  std::mutex mutex;
  std::set<DeviceEngine*> engines;
};
Living& living() {
  static auto* it = new Living;  // outlives static destructors
  return *it;
}

/// Makes a stream current in this thread for a while, and its device.
class Current {
 public:
  Current(const c10::impl::VirtualGuardImpl& impl, c10::Stream stream)
      : impl_(impl), device_(stream.device()), before_(impl.exchangeStream(stream)) {}
  ~Current() { impl_.exchangeStream(before_); }
  Current(const Current&) = delete;
  Current& operator=(const Current&) = delete;

 private:
  const c10::impl::VirtualGuardImpl& impl_;
  const c10::DeviceGuard device_;
  const c10::Stream before_;
};

}  // namespace

DeviceEngine::DeviceEngine(DeviceEngineConfig config, std::unique_ptr<DeviceIssuer> issuer,
                           std::unique_ptr<KeyValueStore> store)
    : config_(std::move(config)),
      forkGeneration_(fastcoll::forkGeneration()),
      issuer_(std::move(issuer)),
      store_(std::move(store)) {
  const std::lock_guard<std::mutex> lock(living().mutex);
  living().engines.insert(this);
}

DeviceEngine::~DeviceEngine() {
  {
    const std::lock_guard<std::mutex> lock(living().mutex);
    living().engines.erase(this);
  }
  shutdown(kShortGrace);
}

std::string DeviceEngine::prefix(const char* call, std::uint64_t seq) const {
  return concat("fastcoll.", call, " [group '", config_.name, "', rank ", config_.rank, "/",
                config_.size, ", seq ", seq, "]: ");
}

DeviceEngine::OfDevice& DeviceEngine::ofDevice(const c10::impl::VirtualGuardImpl& impl,
                                               c10::Device device) {
  const auto found = devices_.find(device.index());
  if (found != devices_.end()) return found->second;
  OfDevice made{impl.getStreamFromGlobalPool(device, config_.highPriority),
                {},
                std::make_shared<EventPool>(device.type())};
  return devices_.emplace(device.index(), std::move(made)).first->second;
}

c10::Stream DeviceEngine::streamFor(const c10::impl::VirtualGuardImpl& impl, OfDevice& own,
                                    const DeviceCall& call) {
  if (call.pair < 0) return call.async ? own.communication : impl.getStream(call.device);
  const auto found = own.pairs.find(call.pair);
  if (found != own.pairs.end()) return found->second;
  return own.pairs
      .emplace(call.pair, impl.getStreamFromGlobalPool(call.device, config_.highPriority))
      .first->second;
}

void DeviceEngine::throwIfUnusable(const char* call) const {
  if (forkGeneration_ != fastcoll::forkGeneration()) {
    throw Error(ErrorKind::Backend,
                prefix(call, sequence_ + 1) +
                    "this process was forked from the one that made the group, and cannot use it. "
                    "Make process groups after the fork, or start processes by 'spawn'.");
  }
  if (failed_)
    throw Error(faultKind_, prefix(call, sequence_ + 1) + "the group has failed: " + fault_);
  if (closed_) {
    throw Error(ErrorKind::Backend,
                prefix(call, sequence_ + 1) +
                    "the group was destroyed. Initialize it again to use it again.");
  }
}

DeviceEngine::Launched DeviceEngine::launch(std::vector<DeviceCall> calls) {
  const DeviceCall& first = calls.front();
  std::vector<DeviceRequest> requests;
  std::vector<at::Tensor> used;
  auto flight = std::make_shared<Flight>();
  for (DeviceCall& call : calls) {
    for (DeviceRequest& request : call.requests) {
      flight->inElements += request.in.count;
      flight->outElements += request.out.count;
      requests.push_back(request);
    }
    std::move(call.used.begin(), call.used.end(), std::back_inserter(used));
  }
  flight->call = calls.size() == 1 ? first.name : "batch";
  flight->dtype = first.dtype;
  flight->device = first.device;
  flight->timeout = first.timeout;

  const std::lock_guard<std::mutex> inOrder(launchMutex_);
  for (const FlightRef& ended : enroll(flight)) ended->letGoHere();
  const c10::impl::VirtualGuardImpl impl(first.device.type());
  const c10::Stream callers = impl.getStream(first.device);
  OfDevice& own = ofDevice(impl, first.device);
  const c10::Stream stream = streamFor(impl, own, first);
  if (stream != callers) flight->keep(std::move(used));
  try {
    const Current current(impl, stream);
    if (stream != callers) {
      const auto ready = own.events->take();
      ready->record(callers);
      ready->block(stream);
    }
    const bool captured = issuer_->issue(requests, stream, calls.size() == 1 ? first.pair : -1);
    for (const DeviceCall& call : calls) {
      if (call.after) call.after();
    }
    // An event that a graph captured belongs to the graph.
    auto end = captured ? std::make_shared<c10::Event>(first.device.type()) : own.events->take();
    end->record(stream);
    flight->issued(std::move(end), captured);
    if (captured) strike(flight);
  } catch (const Error& error) {
    strike(flight);
    if (auto fault = flight->fault()) std::rethrow_exception(fault);  // the watchdog's says more
    throw Error(error.kind(), prefix(flight->call, flight->seq) + error.what());
  } catch (...) {
    strike(flight);
    throw;
  }
  return {std::move(flight), stream};
}

/// Numbers a call, shows it to the watchdog, and returns calls that have ended and still keep
/// tensors.
std::vector<FlightRef> DeviceEngine::enroll(const FlightRef& flight) {
  const std::lock_guard<std::mutex> lock(mutex_);
  throwIfUnusable(flight->call);
  flight->seq = ++sequence_;
  flight->deadline = deadlineAfter(Clock::now(), flight->timeout);
  flights_.push_back(flight);
  startWatching();
  return std::exchange(toFree_, {});
}

/// Takes a call from the watchdog.
void DeviceEngine::strike(const FlightRef& flight) {
  const std::lock_guard<std::mutex> lock(mutex_);
  flights_.erase(std::remove(flights_.begin(), flights_.end(), flight), flights_.end());
}

std::uint64_t DeviceEngine::sequence() const {
  const std::lock_guard<std::mutex> lock(mutex_);
  return sequence_;
}

bool DeviceEngine::faulted(ErrorKind* kind) const {
  const std::lock_guard<std::mutex> lock(mutex_);
  if (failed_ && kind != nullptr) *kind = faultKind_;
  return failed_;
}

void DeviceEngine::abort(ErrorKind kind, const std::string& cause) noexcept {
  try {
    std::deque<FlightRef> flights;
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      if (failed_ || closed_) return;
      failed_ = true;
      faultKind_ = kind;
      fault_ = cause;
      flights.swap(flights_);
      for (const auto& flight : flights) {
        flight->fail(
            std::make_exception_ptr(Error(kind, prefix(flight->call, flight->seq) + cause)));
      }
    }
    issuer_->abort();
    // Not on this thread: freeing may wait for whoever holds Python's lock.
    const std::lock_guard<std::mutex> lock(mutex_);
    toFree_.insert(toFree_.end(), flights.begin(), flights.end());
    changed_.notify_all();
  } catch (const std::exception& error) {
    log(LogLevel::Warn, concat("group '", config_.name, "', rank ", config_.rank,
                               ": abort failed: ", error.what()));
  }
}

void DeviceEngine::shutdown(Milliseconds grace) noexcept {
  bool pending = false;
  {
    std::unique_lock<std::mutex> lock(mutex_);
    if (closed_) return;
    if (forkGeneration_ != fastcoll::forkGeneration()) {
      closed_ = true;
      // The thread is the parent's: there is nothing to join here.
      if (watchdog_.joinable()) watchdog_.detach();
      return;
    }
    // The watchdog removes what has ended, and fails what is late.
    changed_.notify_all();
    changed_.wait_until(lock, deadlineAfter(Clock::now(), std::min(grace, kLongest)),
                        [this] { return flights_.empty() || failed_; });
    pending = !flights_.empty();
  }
  if (pending) abort(ErrorKind::Backend, "the group was destroyed while the call was under way");
  std::thread watchdog;
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    closed_ = true;
    watchdog.swap(watchdog_);
    changed_.notify_all();
  }
  if (watchdog.joinable()) watchdog.join();
  issuer_->close();
}

void DeviceEngine::shutdownAll() noexcept {
  std::set<DeviceEngine*> engines;
  {
    const std::lock_guard<std::mutex> lock(living().mutex);
    engines.swap(living().engines);
  }
  for (DeviceEngine* engine : engines) engine->shutdown(kShortGrace);
}

}  // namespace fastcoll
