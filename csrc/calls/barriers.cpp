// The barriers of ProcessGroupFastcoll: ranks wait for each other and move no data.
#include "process_group.hpp"

namespace fastcoll {

WorkRef ProcessGroupFastcoll::barrier(const c10d::BarrierOptions& opts) {
  return guarded(calls::Barrier, [&](const CallSite& site) {
    auto task = std::make_shared<TensorTask>(site);
    task->before = behindDevice(opts);
    return launch(std::move(task), {opts.asyncOp, opts.timeout, {}, {}});
  });
}

void ProcessGroupFastcoll::monitoredBarrier(const c10d::BarrierOptions& opts, bool waitAllRanks) {
  translated([&] {
    const trace::RecordId record = tracedMonitoredBarrier(timeoutOr(opts.timeout));
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
