#include "cuda/cuda_engine.hpp"

#include <c10/core/DeviceGuard.h>
#include <c10/core/StreamGuard.h>

#include <algorithm>

#include "base/fork.hpp"
#include "base/log.hpp"
#include "cuda/capture.hpp"
#include "cuda/compared_calls.hpp"
#include "cuda/device_plan.hpp"
#include "cuda/fault_bell.hpp"
#include "cuda/host_wait.hpp"
#include "torch/store_adapter.hpp"

namespace fastcoll {
namespace {

constexpr const char* kFindInterrupt = ". Find out what interrupted the rank.";
// How long end() waits for calls under way.
constexpr Milliseconds kShortGrace{1000};

WatchdogConfig configOf(const DeviceGroup& group) {
  WatchdogConfig config;
  config.name = group.name;
  config.rank = group.rank;
  config.size = group.size;
  config.tearsDown = group.settings.errorHandling == "teardown";
  config.heartbeat = std::chrono::seconds(group.settings.heartbeatSeconds);
  config.failing = group.failing;
  config.peers = group.peers;
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
  if (config_.size > 1 && config_.peers->aborted()) {
    watchdog_->lookAtPeers();
    watchdog_->waitForFailure();
  }
  watchdog_->throwIfUnusable(call);
}

CudaEngine::OfDevice& CudaEngine::ofDevice(const c10::impl::VirtualGuardImpl& impl,
                                           c10::Device device) {
  const auto found = devices_.find(device.index());
  if (found != devices_.end()) return found->second;
  OfDevice made{impl.getStreamFromGlobalPool(device, options_->highPriorityStream),
                {},
                c10::Event(device.type()),
                {}};
  return devices_.emplace(device.index(), std::move(made)).first->second;
}

/// `pair`: the peer of a message outside a batch, else -1. Each pair of ranks has its own stream
/// and communicator, so these calls wait for no others. A communicator that exists from the start
/// serves pairs too.
c10::Stream CudaEngine::streamFor(const c10::impl::VirtualGuardImpl& impl, OfDevice& own,
                                  const Call& call, int pair) {
  // A call of one rank waits for nothing, so it needs no stream of its own.
  const bool apart = (call.async || call.batched) && config_.size > 1;
  if (pair < 0) return apart ? own.communication : *call.callers;
  const auto found = own.pairs.find(pair);
  if (found != own.pairs.end()) return found->second;
  return own.pairs
      .emplace(pair,
               impl.getStreamFromGlobalPool(call.callers->device(), options_->highPriorityStream))
      .first->second;
}

void CudaEngine::connect(c10::Device device) {
  throwIfUnusable("init");
  prepare(device, -1, false, "init");
  const std::lock_guard<std::mutex> lock(preparedMutex_);
  bound_ = device;
}

std::optional<c10::Device> CudaEngine::bound() const {
  const std::lock_guard<std::mutex> lock(preparedMutex_);
  return bound_;
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
    if (!captured) meet(device, pair);
    library_->prepare(device, pair, captured);
  } catch (const Error& error) {
    if (error.kind() != ErrorKind::Value) abort(error.kind(), error.what());
    watchdog_->throwIfUnusable(call);  // what ended it, if that came first
    throw Error(error.kind(), watchdog_->site(call, sequence() + 1), error.what());
  } catch (...) {
    abort(ErrorKind::Backend, concat("a call was interrupted before it began", kFindInterrupt));
    throw;
  }
  const std::lock_guard<std::mutex> lock(preparedMutex_);
  prepared_.insert(key);
}

/// The ranks meet before NCCL connects them. Then the watchdog detects a rank that ends meanwhile.
void CudaEngine::meet(c10::Device device, int pair) {
  if (config_.size == 1) return;
  const Milliseconds timeout = options_->timeout;
  watchdog_->watch();
  if (pair >= 0) return config_.peers->meet(pair, timeout);
  config_.peers->meet(timeout);
  const std::lock_guard<std::mutex> lock(preparedMutex_);
  if (!first_) first_ = device;
}

/// Takes no launch lock. Runs before the call's timeout starts.
void CudaEngine::compile(DeviceLaunch& launch, const c10::Stream& stream) {
  try {
    library_->compile(launch, stream);
  } catch (...) {
    abort(ErrorKind::Backend,
          concat("a call failed or was interrupted before it began", kFindInterrupt));
    throw;
  }
}

void CudaEngine::split(int color, int key, DeviceEngine* child) {
  throwIfUnusable("split_group");
  auto* const theirs = static_cast<CudaEngine*>(child);
  const c10::Device device = bound().value();
  prepare(device, -1, false, "split_group");
  const std::lock_guard<std::mutex> inOrder(launchMutex_);  // ordered like any other call
  try {
    const c10::DeviceGuard onDevice(device);
    if (theirs != nullptr) theirs->meet(device, -1);
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
  theirs->bound_ = device;
}

c10::intrusive_ptr<c10d::Work> CudaEngine::launch(DeviceLaunch& launch, bool work) {
  const std::vector<CallRef>& calls = launch.calls;
  InFlightRef flight;
  try {
    flight = put(launch);
  } catch (...) {
    for (const CallRef& call : calls) {
      trace::fail(call->trace, std::current_exception(), watchdog_->faulted());
    }
    throw;
  }
  if (!work) return nullptr;
  std::vector<at::Tensor> outputs = std::move(calls[0]->outputs);
  if (calls[0]->batched) {
    outputs.clear();
    for (const CallRef& call : calls) {
      // The tensors of sends too: the future orders later writes to them.
      const auto used = call->memoryOf();
      outputs.insert(outputs.end(), used.begin(), used.end());
    }
  }
  return c10::make_intrusive<DeviceWork>(config_.rank, *calls[0], flight, std::move(outputs),
                                         options_->blockingWait);
}

std::vector<DeviceRequest> CudaEngine::requestsOf(const std::vector<CallRef>& calls) const {
  std::vector<DeviceRequest> requests;
  for (const CallRef& call : calls) {
    const std::size_t before = requests.size();
    if (call->parts.empty()) planOnDevice(call->request, config_.rank, requests);
    for (const Request& part : call->parts) planOnDevice(part, config_.rank, requests);
    for (std::size_t i = before; i < requests.size(); ++i) requests[i].options = call->options;
  }
  return requests;
}

InFlightRef CudaEngine::put(DeviceLaunch& launch) {
  const std::vector<CallRef>& calls = launch.calls;
  const Call& first = *calls.front();
  const c10::Device device = first.callers->device();
  const char* const name = InFlightCall::nameOf(calls);
  throwIfUnusable(name);
  // Relaxed, because kernel code is loaded and tables are copied to the device here.
  const RelaxedCapture relaxed;
  const bool captured = isCaptured(*first.callers);
  int pair = first.isMessage() && !first.batched ? first.request.root : -1;
  // All ranks make this call, even a rank that has nothing to move.
  const bool everyone = pair < 0;
  const c10::impl::VirtualGuardImpl impl(device.type());
  bool compared = false;
  OfDevice* own = nullptr;
  std::optional<c10::Stream> stream;
  {
    const std::lock_guard<std::mutex> lock(preparedMutex_);
    last_ = device;
    compared = config_.size > 1 && everyone && !captured && (!first_ || first_ == device);
    if (bound_ == device) pair = -1;
    own = &ofDevice(impl, device);
    stream = streamFor(impl, *own, first, pair);
  }
  if (launch.requests.empty()) launch.requests = requestsOf(calls);
  if (pair >= 0) {  // the lower rank of a pair is 0
    for (DeviceRequest& request : launch.requests) request.root = pair > config_.rank;
  }
  if (everyone || !launch.requests.empty()) prepare(device, pair, captured, name);
  if (pair < 0 && !captured) compile(launch, *stream);

  const std::lock_guard<std::mutex> inOrder(launchMutex_);
  // The event of a captured call belongs to its graph, so it is not used again.
  const InFlightRef flight = captured
                                 ? std::make_shared<InFlightCall>(device.type(), false)
                                 : own->flights[*stream].take(device.type(), first.terms.timed);
  flight->begin(launch, *stream);
  const auto apart = [&](const CallRef& call) { return call->callers != stream; };
  if (std::any_of(calls.begin(), calls.end(), apart)) flight->stash(calls);
  watchdog_->track(flight);
  try {
    if (!captured) {
      for (const InFlightRef& ended : watchdog_->takeEnded()) ended->unstashIfEnded();
    }
    const c10::StreamGuard current(*stream);
    if (!launch.requests.empty()) library_->choose(launch, *stream, pair, captured);
    if (const auto mine = compared ? comparedOf(calls, flight->seq) : std::nullopt) {
      flight->number = config_.peers->post(mine->first, mine->others);
    }
    issue(launch, *own, pair, captured, *flight);
    captured ? watchdog_->untrack(flight) : flight->traceStart();
    return flight;
  } catch (const Error& error) {
    if (error.kind() == ErrorKind::Value || error.kind() == ErrorKind::Type) {
      watchdog_->untrack(flight);
      flight->seen();  // nothing was put on the stream: it keeps nothing more
      flight->unstash();
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
}

void CudaEngine::issue(DeviceLaunch& launch, OfDevice& own, int pair, bool captured,
                       InFlightCall& flight) {
  const c10::Stream stream = *flight.stream;
  c10::Stream last = stream;
  for (const CallRef& call : launch.calls) {
    if (call->callers == last || call->callers == stream) continue;
    last = *call->callers;
    c10::Event ofGraph(stream.device_type());
    c10::Event& ready = captured ? ofGraph : own.ready;
    ready.record(last);
    ready.block(stream);
  }
  flight.issuing();
  if (!launch.requests.empty()) library_->issue(launch, stream, pair, captured);
  // Copies results to tensors that are not dense.
  for (const CallRef& call : launch.calls) call->finish();
  flight.issued(captured);
}

std::function<void()> CudaEngine::behind(const Call& barrier, Milliseconds timeout) {
  std::optional<c10::Device> used;
  {
    const std::lock_guard<std::mutex> lock(preparedMutex_);
    used = last_ ? last_ : bound_;
  }
  if (!used) return nullptr;
  c10::Device device = *used;
  const auto& named = barrier.behind;
  if (named && named->type() == device.type() && named->has_index()) device = *named;
  if (barrier.behindIndex) device = c10::Device(device.type(), *barrier.behindIndex);
  const ErrorSite site = errorSite("barrier", config_);
  const c10::Stream stream = c10::impl::VirtualGuardImpl(device.type()).getStream(device);
  if (isCaptured(stream)) {
    throw Error(ErrorKind::Value, site,
                "a barrier waits on the host and cannot be captured into a graph. Call it before "
                "or after the capture.");
  }
  auto end = std::make_shared<c10::Event>(device.type());
  end->record(stream);
  return [end, timeout, site, self = shared_from_this()] {
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
