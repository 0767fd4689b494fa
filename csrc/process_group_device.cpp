// ProcessGroupFastcoll on a device with streams: the engine's life, launching, and a barrier's wait
// for a stream.
#include <ATen/ATen.h>
#include <ATen/record_function.h>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>

#include <atomic>
#include <memory>
#include <mutex>

#include "base/weak_registry.hpp"
#include "cpu/worker_pool.hpp"
#include "process_group.hpp"
#include "torch/work_registry.hpp"

namespace fastcoll {
namespace {

struct Devices {
  std::atomic<const DeviceEngineMaker*> make{nullptr};
  std::function<void()> load;
};

Devices& devices() {
  static auto* all = new Devices;  // outlives static destructors
  return *all;
}

}  // namespace

void setDeviceEngineMaker(DeviceEngineMaker maker) {
  const DeviceEngineMaker* none = nullptr;
  auto* const made = new DeviceEngineMaker(std::move(maker));  // kept: other threads may call it
  if (!devices().make.compare_exchange_strong(none, made)) delete made;
}

void setDeviceLoader(std::function<void()> load) {
  devices().load = std::move(load);
}

// --- life ----------------------------------------------------------------------------------------

std::shared_ptr<DeviceEngine> ProcessGroupFastcoll::device() const {
  const std::lock_guard<std::mutex> lock(deviceMutex_);
  return device_;
}

DeviceEngine& ProcessGroupFastcoll::deviceEngine(c10::DeviceType type) {
  if (forkGeneration_ != forkGeneration()) {  // before any lock: a fork may inherit a held one
    throw Error(ErrorKind::Backend, site("init").errorSite(), kForked);
  }
  const std::lock_guard<std::mutex> making(deviceMaking_);
  {
    const std::lock_guard<std::mutex> lock(deviceMutex_);
    throwIfOver();
    if (device_ != nullptr) return *device_;
  }
  if (devices().make == nullptr) devices().load();  // by import, so once, whatever thread comes
  // A group fails as one: its CPU engine reports the fault to the ranks of this host at once. It
  // does so on another thread, because its abort runs the callbacks of works.
  const auto onFault = [cpu = std::weak_ptr<CpuEngine>(engine_)](ErrorKind kind,
                                                                 const std::string& cause) {
    runOnWorker([cpu, kind, cause] {
      if (const auto engine = cpu.lock()) engine->abort(kind, cause);
    });
  };
  auto made = (*devices().make)({c10::make_intrusive<c10d::PrefixStore>("fastcoll/device", store_),
                                 name_, engine_->config().settings, rank_, size_, options_, type,
                                 [hooks = abortHooks_] { hooks->callElsewhere(); }, onFault});
  deviceRegistry().add(made);
  const std::lock_guard<std::mutex> lock(deviceMutex_);
  throwIfOver();  // it may have ended meanwhile
  device_ = std::move(made);
  return *device_;
}

/// Called under the lock.
void ProcessGroupFastcoll::throwIfOver() const {
  if (over_.empty()) return;
  throw Error(ErrorKind::Backend, site("init").errorSite(), over_, kInitAgain);
}

WeakRegistry<DeviceEngine>& ProcessGroupFastcoll::deviceRegistry() {
  static auto* all = new WeakRegistry<DeviceEngine>;  // outlives static destructors
  return *all;
}

/// Called when torch binds this process to a device. Makes the communicator at once.
void ProcessGroupFastcoll::eagerConnectSingleDevice(at::Device device) {
  translated([&] {
    if (!isServed(device.type())) return;
    deviceEngine(device.type()).connect(device);
    const std::lock_guard<std::mutex> lock(deviceMutex_);
    bound_ = device;
    usesDevice_ = true;
  });
}

/// Splits the child's communicator from this group's, if torch has bound this process to a
/// device: only then do all ranks have one. `child` is nullptr on ranks that join none.
void ProcessGroupFastcoll::splitDevice(int color, ProcessGroupFastcoll* child) {
  std::optional<c10::Device> device;
  {
    const std::lock_guard<std::mutex> lock(deviceMutex_);
    device = bound_;
  }
  if (!device) return;
  DeviceEngine* const theirs = child != nullptr ? &child->deviceEngine(device->type()) : nullptr;
  deviceEngine(device->type()).split(*device, color, rank_, theirs);
  if (child == nullptr) return;
  const std::lock_guard<std::mutex> lock(child->deviceMutex_);
  child->bound_ = device;
  child->usesDevice_ = true;
}

// --- launching -----------------------------------------------------------------------------------

WorkRef ProcessGroupFastcoll::launchOnDevice(const CallRef& call) {
  beforeWait();
  const c10::Device device = *call->device();
  const int pair = call->isMessage() ? call->request.root : -1;
  DeviceEngine& engine = deviceEngine(device.type());
  const auto traced = [&] {
    describe(*call);
    return pair >= 0 ? recordMessage(call->draft) : trace::record(call->draft, call->draft.seq);
  };
  try {
    engine.throwIfUnusable(collectiveName(call->request.collective));
  } catch (const Error& error) {
    // Trace the first refused call: it distinguishes a late rank from an absent one.
    if (!refused_.exchange(true)) trace::fail(traced(), error.what());
    throw;
  }
  bool bound = false;
  {
    const std::lock_guard<std::mutex> lock(deviceMutex_);
    lastDevice_ = device;
    usesDevice_ = true;
    bound = bound_ == device;
  }
  DeviceCall one(c10::impl::VirtualGuardImpl(device.type()).getStream(device));
  one.name = collectiveName(call->request.collective);
  WorkTerms terms = termsOf(call->timeout);
  one.timed = terms.timed;
  one.timeout = terms.timeout;
  one.extension = std::move(terms.extension);
  one.dtype = call->request.dtype;
  one.pair = bound ? -1 : pair;  // a bound group's communicator exists already and serves pairs
  one.everyone = pair < 0;
  if (call->parts.empty()) {
    engine.plan(call->request, one.requests);
  } else {
    for (const Request& part : call->parts) engine.plan(part, one.requests);
  }
  for (DeviceRequest& request : one.requests) request.options = call->options;
  call->prepare();  // on the caller's stream
  one.used = call->memoryOf();
  one.after = [call] { call->finish(); };
  one.trace = traced();  // numbered last: from here on, other ranks see every failure
  one.async = call->async || collects();
  if (collects()) {
    const std::lock_guard<std::mutex> lock(coalescingMutex_);
    batch_.push_back(std::move(one));
    return nullptr;
  }
  const bool profiled = at::hasCallbacks();
  if (profiled) {
    recordParameters(*call, call->inputs, call->outputs, one.name, engine.sequence() + 1);
  }
  std::optional<WorkDraft> draft;
  if (one.async || profiled || options_->blockingWait || listsWorks()) {
    const CallType& type = *call->site.type;
    draft = {type.type, nullptr, std::nullopt, std::move(call->outputs)};
    if (profiled) {
      draft->title = type.title;
      draft->profiled = std::move(call->inputs);
    }
  }
  std::vector<DeviceCall> calls;
  calls.push_back(std::move(one));
  return engine.launch(std::move(calls), std::move(draft));
}

/// Launches the calls of a batch as one; nullptr if there were none.
WorkRef ProcessGroupFastcoll::launchBatch() {
  std::vector<DeviceCall> calls;
  {
    const std::lock_guard<std::mutex> lock(coalescingMutex_);
    calls.swap(batch_);
  }
  if (calls.empty()) return nullptr;
  const c10::Device device = calls[0].callers.device();
  for (const DeviceCall& call : calls) {
    if (call.callers.device() != device) {
      throw Error(ErrorKind::Value, site("batch").errorSite(),
                  "expected tensors of one device in a batch, got ", device, " and ",
                  call.callers.device(), ". Make a batch for each.");
    }
  }
  Tensors outputs;
  for (DeviceCall& call : calls) {
    call.pair = -1;
    call.everyone = true;  // even with nothing to move: other ranks may have something
    // The tensors of sends too: the future orders later writes to them.
    outputs.insert(outputs.end(), call.used.begin(), call.used.end());
  }
  WorkDraft draft{c10d::OpType::COALESCED, nullptr, std::nullopt, std::move(outputs)};
  return deviceEngine(device.type()).launch(std::move(calls), std::move(draft));
}

// --- barrier -------------------------------------------------------------------------------------

/// Returns what a barrier does before the ranks meet on their hosts. It waits for all work that
/// the current stream has so far, on the device that is named, or else was used last. The meeting
/// of the ranks must not depend on what each has used, so the devices themselves do not meet. A
/// group that neither used a device nor is bound to one waits for none, even if the caller names
/// one: torch names device 0 if there is no device, and a group of CPU tensors starts no CUDA.
std::function<void()> ProcessGroupFastcoll::behindDevice(const Call& barrier) {
  if (!usesDevice_) return nullptr;
  beforeWait();
  std::optional<c10::Device> device;
  {
    const std::lock_guard<std::mutex> lock(deviceMutex_);
    device = lastDevice_ ? lastDevice_ : bound_;
  }
  const auto& named = barrier.behind;
  if (named && named->type() == device->type() && named->has_index()) device = named;
  if (barrier.behindIndex) device = c10::Device(device->type(), *barrier.behindIndex);
  const auto engine = this->device();
  if (engine == nullptr) return nullptr;
  return engine->reached(*device, timeoutOr(barrier.timeout), site("barrier").errorSite());
}

}  // namespace fastcoll
