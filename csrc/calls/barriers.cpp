// Barriers: ranks wait for each other and move no data.
#include "process_group.hpp"

namespace fastcoll {

CallRef Doors::barrier(const c10d::BarrierOptions& opts) const {
  auto call = std::make_shared<Call>(at(calls::Barrier));
  call->behind = opts.device;
  if (!opts.device_ids.empty()) {
    call->behindIndex = static_cast<c10::DeviceIndex>(opts.device_ids[0]);
  }
  return asked(std::move(call), opts, {}, {});
}

void ProcessGroupFastcoll::monitoredBarrier(const c10d::BarrierOptions& opts, bool waitAllRanks) {
  translated([&] {
    const trace::RecordId record = trace_->monitoredBarrier(timeoutOr(opts.timeout));
    try {
      engine_->monitoredBarrier(timeoutOr(opts.timeout), waitAllRanks);
    } catch (...) {
      trace::fail(record, std::current_exception(), engine_->faulted());
      throw;
    }
    trace::complete(record);
  });
}

}  // namespace fastcoll
