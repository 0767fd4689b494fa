// Launching of ProcessGroupFastcoll on a device with streams.
#include <ATen/ATen.h>
#include <ATen/record_function.h>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>

#include "device/device_plan.hpp"
#include "device/device_work.hpp"
#include "process_group.hpp"
#include "store_adapter.hpp"
#include "torch_error.hpp"

namespace fastcoll {
namespace {

ProcessGroupFastcoll::DeviceFactory& deviceFactory() {
  static auto* factory = new ProcessGroupFastcoll::DeviceFactory;
  return *factory;
}

}  // namespace

using WorkRef = ProcessGroupFastcoll::WorkRef;

void ProcessGroupFastcoll::setDeviceFactory(DeviceFactory factory) {
  deviceFactory() = std::move(factory);
}

DeviceEngine& ProcessGroupFastcoll::deviceEngine(c10::DeviceType type) {
  const std::lock_guard<std::mutex> lock(deviceMutex_);
  if (device_ != nullptr) return *device_;
  if (!deviceFactory()) {
    throw Error(ErrorKind::Backend, "fastcoll: no way to a library for device tensors was given");
  }
  auto store = c10::make_intrusive<c10d::PrefixStore>("fastcoll/device", store_);
  DeviceEngineConfig config;
  config.name = name_;
  config.rank = rank_;
  config.size = size_;
  device_ = std::make_shared<DeviceEngine>(
      config, deviceFactory()(store, name_, rank_, size_, options_->timeout, type),
      std::make_unique<StoreAdapter>(store));
  return *device_;
}

/// The device whose streams the ranks meet on, if the group has used one or the caller names one.
std::optional<c10::Device> ProcessGroupFastcoll::deviceOfBarrier(const c10d::BarrierOptions& opts) {
  const std::lock_guard<std::mutex> lock(deviceMutex_);
  const auto index = opts.device_ids.empty() ? std::optional<c10::DeviceIndex>()
                                             : static_cast<c10::DeviceIndex>(opts.device_ids[0]);
  if (lastDevice_) return index ? c10::Device(lastDevice_->type(), *index) : *lastDevice_;
  if (index && isServed(c10::kCUDA)) return c10::Device(c10::kCUDA, *index);
  return std::nullopt;
}

WorkRef ProcessGroupFastcoll::launchOnDevice(std::shared_ptr<TensorTask> task, Call call,
                                             int pair) {
  DeviceEngine& engine = deviceEngine(task->device()->type());
  {
    const std::lock_guard<std::mutex> lock(deviceMutex_);
    lastDevice_ = task->device();
  }
  const bool blocks = call.type == c10d::OpType::BARRIER;
  DeviceCall one;
  one.name = blocks ? "barrier" : collectiveName(task->request.collective);
  one.timeout = timeoutOr(call.timeout);
  one.device = *task->device();
  one.dtype = task->request.dtype;
  one.pair = pair;
  if (task->parts.empty()) {
    planOnDevice(task->request, rank_, one.requests);
  } else {
    for (const Request& part : task->parts) planOnDevice(part, rank_, one.requests);
  }
  task->prepare();  // on the caller's stream
  one.used = task->memoryOf();
  one.after = [task] { task->finish(); };
  WorkRef none;
  const bool collects = collecting(none);
  one.async = call.async || collects;
  if (collects) {
    const std::lock_guard<std::mutex> lock(coalescingMutex_);
    batch_.push_back(std::move(one));
    return nullptr;
  }
  const bool profiled = at::hasCallbacks();
  if (profiled) recordParameters(call, one.name, engine.sequence() + 1, pair >= 0);
  const bool async = one.async;
  std::vector<DeviceCall> calls;
  calls.push_back(std::move(one));
  auto launched = engine.launch(std::move(calls));
  if (!async && !profiled && !blocks) return nullptr;
  auto work = c10::make_intrusive<DeviceWork>(
      rank_, call.type, profiled ? call.title : nullptr,
      profiled ? std::optional<Tensors>(std::move(call.inputs)) : std::nullopt,
      std::move(call.outputs), std::move(launched.flight), launched.stream, blocks);
  return work;
}

/// The calls of a batch as one; nullptr if there were none.
WorkRef ProcessGroupFastcoll::launchBatch() {
  std::vector<DeviceCall> calls;
  {
    const std::lock_guard<std::mutex> lock(coalescingMutex_);
    calls.swap(batch_);
  }
  if (calls.empty()) return nullptr;
  return translated([&]() -> WorkRef {
    for (const DeviceCall& call : calls) {
      if (call.device != calls[0].device) {
        throw Error(
            ErrorKind::Value,
            concat(site("batch").prefix(), "expected tensors of one device in a batch, got ",
                   calls[0].device, " and ", call.device, ". Make a batch for each."));
      }
    }
    Tensors outputs;
    for (DeviceCall& call : calls) call.pair = -1;
    auto launched = deviceEngine(calls[0].device.type()).launch(std::move(calls));
    return c10::make_intrusive<DeviceWork>(rank_, c10d::OpType::COALESCED, nullptr, std::nullopt,
                                           std::move(outputs), std::move(launched.flight),
                                           launched.stream, false);
  });
}

}  // namespace fastcoll
