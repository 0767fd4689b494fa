// ProcessGroupFastcoll on a device with streams: binding, launching, and a barrier's wait for a
// stream.
#include <ATen/record_function.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include "base/entry_lock.hpp"
#include "process_group.hpp"
#include "torch/work_registry.hpp"

namespace fastcoll {

/// Called when torch binds this process to a device.
void ProcessGroupFastcoll::eagerConnectSingleDevice(at::Device device) {
  translated([&] {
    if (isServed(device.type())) device_->engine(device.type()).connect(device);
  });
}

/// Splits the child's communicator from this group's, if torch has bound this process to a
/// device: only then do all ranks have one. `child` is nullptr on ranks that join none.
void ProcessGroupFastcoll::splitDevice(int color, ProcessGroupFastcoll* child) {
  const auto ours = device_->made();
  const auto bound = ours != nullptr ? ours->bound() : std::nullopt;
  if (!bound) return;
  ours->split(color, rank_, child != nullptr ? &child->device_->engine(bound->type()) : nullptr);
}

/// `launch`: of one call.
WorkRef ProcessGroupFastcoll::launchOnDevice(DeviceLaunch& launch) {
  beforeWait();
  const CallRef& call = launch.calls[0];
  const c10::Device device = *call->device();
  const char* const name = collectiveName(call->request.collective);
  DeviceEngine& engine = device_->engine(device.type());
  try {
    engine.throwIfUnusable(name);
  } catch (const Error& error) {
    // Trace the first refused call: it distinguishes a late rank from an absent one.
    if (trace_->isFirstRefusal()) trace::fail(trace_->onDevice(call->draft), error.what());
    throw;
  }
  call->callers = c10::impl::VirtualGuardImpl(device.type()).getStream(device);
  call->terms = termsOf(call->timeout);
  call->batched = batch_.collects();
  call->prepare();  // on the caller's stream
  // Numbered last: from here on, other ranks see every failure.
  call->trace = trace_->onDevice(call->draft);
  if (call->batched) {
    batch_.add(call);
    return nullptr;
  }
  const bool profiled = at::hasCallbacks();
  if (profiled) recordParameters(*call, call->inputs, call->outputs, name, engine.sequence() + 1);
  return engine.launch(launch, call->async || profiled || options_->blockingWait || listsWorks());
}

/// Launches the calls of a batch as one.
WorkRef ProcessGroupFastcoll::launchBatch(std::vector<CallRef> calls) {
  const c10::Device device = *calls[0]->device();
  for (const CallRef& call : calls) {
    if (*call->device() != device) {
      throw Error(ErrorKind::Value, site("batch").errorSite(),
                  "expected tensors of one device in a batch, got ", device, " and ",
                  *call->device(), ". Make a batch for each.");
    }
  }
  DeviceLaunch launch{std::move(calls)};
  return device_->engine(device.type()).launch(launch, true);
}

std::function<void()> ProcessGroupFastcoll::behindDevice(const Call& barrier) {
  if (!device_->isMade()) return nullptr;
  beforeWait();
  return device_->made()->behind(barrier, timeoutOr(barrier.timeout));
}

}  // namespace fastcoll
