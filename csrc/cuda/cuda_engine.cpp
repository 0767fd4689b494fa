#include "cuda/cuda_engine.hpp"

#include <c10/core/DeviceGuard.h>
#include <c10/core/StreamGuard.h>

#include <algorithm>
#include <iterator>

#include "base/fork.hpp"
#include "base/log.hpp"
#include "cuda/capture.hpp"
#include "cuda/fault_bell.hpp"
#include "cuda/host_wait.hpp"
#include "torch/store_adapter.hpp"

namespace fastcoll {
namespace {

constexpr const char* kFindInterrupt = ". Find out what interrupted the rank.";
// How long end() waits for calls under way.
constexpr Milliseconds kShortGrace{1000};

std::shared_ptr<InFlightCall> flightOf(const std::vector<DeviceCall>& calls) {
  auto flight = std::make_shared<InFlightCall>();
  const DeviceCall& first = calls.front();
  flight->call = calls.size() == 1 ? first.name : "batch";
  flight->dtype = first.dtype;
  flight->device = first.callers.device();
  flight->timeout = first.timeout;
  for (const DeviceCall& call : calls) {
    if (call.extension) flight->whenEnded([held = call.extension]() mutable { held.reset(); });
    if (call.trace != 0) flight->traces.push_back(call.trace);
    for (const DeviceRequest& request : call.requests) {
      flight->inElements += request.in.count;
      flight->outElements += request.out.count;
    }
  }
  return flight;
}

WatchdogConfig configOf(const DeviceGroup& group) {
  WatchdogConfig config;
  config.name = group.name;
  config.rank = group.rank;
  config.size = group.size;
  config.tearsDown = group.settings.errorHandling == "teardown";
  config.heartbeat = std::chrono::seconds(group.settings.heartbeatSeconds);
  config.failing = group.failing;
  return config;
}

}  // namespace

CudaEngine::CudaEngine(const DeviceGroup& group, std::unique_ptr<DeviceLibrary> library)
    : config_(configOf(group)),
      options_(group.options),
      forkGeneration_(fastcoll::forkGeneration()),
      library_(std::move(library)),
      watchdog_(std::make_shared<Watchdog>(config_, std::make_unique<StoreAdapter>(group.store),
                                           FaultBell::of(group.store), library_->communicators(),
                                           group.onFault)) {}

CudaEngine::~CudaEngine() {
  end();
}

void CudaEngine::end() noexcept {
  try {
    shutdown(kShortGrace);
  } catch (const Error& error) {
    log(LogLevel::Warn, error.what());
  } catch (...) {  // Ctrl-C while the process ends
  }
}

bool CudaEngine::forked() const {
  return forkGeneration_ != fastcoll::forkGeneration();
}

void CudaEngine::throwIfUnusable(const char* call) const {
  if (forked()) {  // before any lock: a fork may inherit a held one
    throw Error(ErrorKind::Backend, concat(errorSite(call, config_), kForked));
  }
  watchdog_->throwIfUnusable(call);
}

CudaEngine::OfDevice& CudaEngine::ofDevice(const c10::impl::VirtualGuardImpl& impl,
                                           c10::Device device) {
  const auto found = devices_.find(device.index());
  if (found != devices_.end()) return found->second;
  OfDevice made{
      impl.getStreamFromGlobalPool(device, options_->highPriorityStream),
      {},
      std::make_shared<EventPool>(device.type()),
      std::make_shared<EventPool>(device.type(), c10::EventFlag::BACKEND_DEFAULT),
  };
  return devices_.emplace(device.index(), std::move(made)).first->second;
}

c10::Stream CudaEngine::streamFor(const c10::impl::VirtualGuardImpl& impl, OfDevice& own,
                                  const DeviceCall& call) {
  // A call of one rank waits for nothing, so it needs no stream of its own.
  const bool apart = call.async && config_.size > 1;
  if (call.pair < 0) return apart ? own.communication : call.callers;
  const auto found = own.pairs.find(call.pair);
  if (found != own.pairs.end()) return found->second;
  return own.pairs
      .emplace(call.pair,
               impl.getStreamFromGlobalPool(call.callers.device(), options_->highPriorityStream))
      .first->second;
}

void CudaEngine::connect(c10::Device device) {
  throwIfUnusable("init");
  prepare(device, -1, false, "init");
}

/// Takes no launch lock. While a communicator waits for a rank, that rank may first need a call
/// from another thread of this one.
void CudaEngine::prepare(c10::Device device, int pair, bool captured, const char* call) {
  const std::pair<c10::DeviceIndex, int> key{device.index(), pair};
  {
    const std::lock_guard<std::mutex> lock(preparedMutex_);
    if (prepared_.count(key) != 0) return;
  }
  try {
    const c10::DeviceGuard onDevice(device);
    library_->prepare(device, pair, captured);
  } catch (const Error& error) {
    if (error.kind() != ErrorKind::Value) abort(error.kind(), error.what());
    throw Error(error.kind(), watchdog_->site(call, sequence() + 1), error.what());
  } catch (...) {
    abort(ErrorKind::Backend, concat("a call was interrupted before it began", kFindInterrupt));
    throw;
  }
  const std::lock_guard<std::mutex> lock(preparedMutex_);
  prepared_.insert(key);
}

/// Takes no launch lock. Runs before the call's timeout starts.
void CudaEngine::compile(const std::vector<DeviceRequest>& requests, const c10::Stream& stream) {
  try {
    library_->compile(requests, stream);
  } catch (...) {
    abort(ErrorKind::Backend,
          concat("a call failed or was interrupted before it began", kFindInterrupt));
    throw;
  }
}

void CudaEngine::split(c10::Device device, int color, int key, DeviceEngine* child) {
  throwIfUnusable("split_group");
  auto* const theirs = static_cast<CudaEngine*>(child);
  prepare(device, -1, false, "split_group");
  const std::lock_guard<std::mutex> inOrder(launchMutex_);  // ordered like any other call
  try {
    const c10::DeviceGuard onDevice(device);
    library_->split(device, color, key, theirs != nullptr ? theirs->library_.get() : nullptr);
  } catch (const Error& error) {
    abort(error.kind(), error.what());
    throw;
  } catch (...) {
    abort(ErrorKind::Backend, "a split was interrupted");
    throw;
  }
  if (theirs == nullptr) return;
  const std::lock_guard<std::mutex> lock(theirs->preparedMutex_);
  theirs->prepared_.insert({device.index(), -1});
}

c10::intrusive_ptr<c10d::Work> CudaEngine::launch(std::vector<DeviceCall> calls,
                                                  std::optional<WorkDraft> draft) {
  auto flight = flightOf(calls);
  try {
    auto launched = put(std::move(calls), flight);
    if (!draft) return nullptr;
    return c10::make_intrusive<DeviceWork>(config_.rank, std::move(*draft), std::move(launched),
                                           options_->blockingWait);
  } catch (...) {
    flight->traceEnd(std::current_exception(), watchdog_->faulted());
    throw;
  }
}

Launched CudaEngine::put(std::vector<DeviceCall> calls, const InFlightRef& flight) {
  const DeviceCall& first = calls.front();
  throwIfUnusable(flight->call);
  // Relaxed, because kernel code is loaded and tables are copied to the device here.
  const RelaxedCapture relaxed;
  const bool captured = isCaptured(first.callers);
  const int pair = calls.size() == 1 ? first.pair : -1;
  if (std::any_of(calls.begin(), calls.end(),
                  [](const DeviceCall& call) { return call.everyone || !call.requests.empty(); })) {
    prepare(flight->device, pair, captured, flight->call);
  }
  std::vector<DeviceRequest> requests;
  for (DeviceCall& call : calls) {
    std::move(call.requests.begin(), call.requests.end(), std::back_inserter(requests));
  }
  if (pair >= 0) {  // in a pair's communicator the lower rank is 0
    for (DeviceRequest& request : requests) request.root = pair > config_.rank;
  } else if (!captured) {
    compile(requests, first.callers);
  }

  const std::lock_guard<std::mutex> inOrder(launchMutex_);
  const c10::impl::VirtualGuardImpl impl(flight->device.type());
  OfDevice& own = ofDevice(impl, flight->device);
  const c10::Stream stream = streamFor(impl, own, first);
  std::vector<at::Tensor> used;
  bool apart = false;
  bool together = true;
  for (DeviceCall& call : calls) {
    apart = apart || call.callers != stream;
    together = together && call.callers == first.callers;
    std::move(call.used.begin(), call.used.end(), std::back_inserter(used));
  }
  if (apart) flight->stash(std::move(used));
  watchdog_->track(flight);
  try {
    if (!captured) {
      for (const InFlightRef& ended : watchdog_->takeEnded()) ended->unstashIfEnded();
    }
    issue(calls, requests, own, stream, captured, *flight);
    captured ? watchdog_->untrack(flight) : flight->traceStart();
  } catch (const Error& error) {
    if (error.kind() == ErrorKind::Value || error.kind() == ErrorKind::Type) {
      watchdog_->untrack(flight);
    } else {
      // From here on this rank would be one call behind the others, so the group fails.
      watchdog_->fail(error.kind(), concat(flight->describe(), " failed: ", error.what()), false);
      watchdog_->waitForFailure();
      if (auto fault = flight->fault())
        std::rethrow_exception(fault);  // has more detail if it came first
    }
    throw Error(error.kind(), watchdog_->site(flight->call, flight->seq), error.what());
  } catch (const c10::Error& error) {
    abort(ErrorKind::Backend,
          concat(flight->describe(), " failed: ", error.what_without_backtrace()));
    throw;
  } catch (...) {
    abort(ErrorKind::Backend, concat(flight->describe(), " was interrupted", kFindInterrupt));
    throw;
  }
  return {flight, stream, together ? std::optional<c10::Stream>(first.callers) : std::nullopt};
}

void CudaEngine::issue(const std::vector<DeviceCall>& calls,
                       const std::vector<DeviceRequest>& requests, OfDevice& own,
                       const c10::Stream& stream, bool captured, InFlightCall& flight) {
  const c10::StreamGuard current(stream);
  const bool timed = calls.front().timed;
  const auto event = [&]() -> std::shared_ptr<c10::Event> {
    // A captured event belongs to its graph, so it is not pooled.
    if (captured) return std::make_shared<c10::Event>(stream.device_type());
    return timed ? own.timedEvents->take() : own.events->take();
  };
  c10::Stream last = stream;
  for (const DeviceCall& call : calls) {
    if (call.callers == last || call.callers == stream) continue;
    last = call.callers;
    const auto ready = captured ? event() : own.events->take();
    ready->record(call.callers);
    ready->block(stream);
  }
  std::shared_ptr<c10::Event> begin;
  if (timed && !captured) {
    begin = event();
    begin->record(stream);
  }
  const int pair = calls.size() == 1 ? calls.front().pair : -1;
  if (!requests.empty()) library_->issue(requests, stream, pair, captured);
  for (const DeviceCall& call : calls) {
    if (call.after) call.after();
  }
  auto end = event();
  end->record(stream);
  flight.issued(std::move(begin), std::move(end), captured);
}

std::function<void()> CudaEngine::reached(c10::Device device, Milliseconds timeout,
                                          ErrorSite site) {
  const c10::Stream stream = c10::impl::VirtualGuardImpl(device.type()).getStream(device);
  if (isCaptured(stream)) {
    throw Error(ErrorKind::Value, site,
                "a barrier waits on the host and cannot be captured into a graph. Call it before "
                "or after the capture.");
  }
  auto end = std::make_shared<c10::Event>(device.type());
  end->record(stream);
  return [end, timeout, site = std::move(site), self = shared_from_this()] {
    const auto ended = [&] {
      self->throwIfUnusable("barrier");
      const RelaxedCapture relaxed;
      return end->query();
    };
    if (!waitOnHost(ended, deadlineAfter(Clock::now(), timeout))) {
      throw Error(ErrorKind::Timeout, site, "timed out after ", timeout.count(),
                  " ms waiting for the work that this rank's stream was given before the barrier",
                  kFindDelay);
    }
  };
}

void CudaEngine::abort(ErrorKind kind, const std::string& cause) noexcept {
  if (forked()) return;
  watchdog_->acknowledge();  // the caller knows
  watchdog_->fail(kind, cause, false);
}

void CudaEngine::shutdown(Milliseconds grace) {
  if (forked() || shutDown_.exchange(true)) return;  // a fork's state belongs to the parent
  const auto [quiet, interrupted] = watchdog_->close(grace);
  auto kept = watchdog_->takeEnded();
  try {
    if (quiet) {
      kept.erase(std::remove_if(kept.begin(), kept.end(),
                                [](const InFlightRef& flight) { return flight->unstashIfEnded(); }),
                 kept.end());
    }
  } catch (const std::exception&) {  // the device has failed
  }
  // The device may still write to the rest, so it stays allocated.
  if (!kept.empty()) new std::vector<InFlightRef>(std::move(kept));
  library_->close();
  if (interrupted) std::rethrow_exception(interrupted);
  if (const auto error = watchdog_->unreported()) throw *error;
}

}  // namespace fastcoll
