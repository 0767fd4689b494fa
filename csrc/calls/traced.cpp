// Records the groups and calls of ProcessGroupFastcoll in the trace. Each call has the name, sizes
// and dtypes that torch's analyser expects of a correct one (base/collectives.def).
#include <ATen/ATen.h>

#include <algorithm>
#include <mutex>
#include <vector>

#include "base/weak_registry.hpp"
#include "calls/message.hpp"
#include "process_group.hpp"

namespace fastcoll {
namespace {

// Groups that the trace's thread polls. Raw pointers, because that thread must never drop the last
// reference to a group.
struct Watched {
  std::mutex mutex;
  std::vector<ProcessGroupFastcoll*> groups;
};

Watched& watched() {
  static auto* all = new PerProcess<Watched>;  // outlives static destructors
  return all->get();
}

/// Adds one side's tensors. `other`: those of the other side.
void add(trace::Shapes& shapes, bool output, TracedAs how, at::TensorList tensors,
         at::TensorList other = {}, int ranks = 0) {
  if (how == TracedAs::Total) {
    std::int64_t total = 0;
    for (const auto& tensor : tensors) total += tensor.numel();
    return shapes.add(output, dtypeOf(tensors[0].scalar_type()), &total, 1);
  }
  if (how == TracedAs::Gathered || how == TracedAs::Other) tensors = other;
  if (how == TracedAs::Row) tensors = tensors.slice(0, std::min<std::size_t>(tensors.size(), 1));
  const bool rows = how == TracedAs::Row || how == TracedAs::Gathered;
  for (const auto& tensor : tensors) {
    const auto sizes = tensor.sizes();
    shapes.add(output, dtypeOf(tensor.scalar_type()), sizes.data(), sizes.size(), rows ? ranks : 0);
  }
}

}  // namespace

// --- groups --------------------------------------------------------------------------------------

void ProcessGroupFastcoll::beginTrace() {
  trace::begin(engine_->config().settings, FASTCOLL_VERSION);
  const auto& ranks = options_->global_ranks_in_group;
  const std::size_t mine = rank_;
  trace::setRank(mine < ranks.size() ? static_cast<int>(ranks[mine]) : rank_);
  if (!trace::isWatching()) return;
  auto& all = watched();
  {
    const std::lock_guard<std::mutex> lock(all.mutex);
    all.groups.push_back(this);
  }
  trace::setPoll(&pollGroups);
}

void ProcessGroupFastcoll::endTrace() {
  auto& all = watched();
  {
    const std::lock_guard<std::mutex> lock(all.mutex);
    all.groups.erase(std::remove(all.groups.begin(), all.groups.end(), this), all.groups.end());
  }
  trace::endGroup(traceGroup_);
}

void ProcessGroupFastcoll::pollGroups() {
  std::vector<std::uint32_t> failed;
  {
    auto& all = watched();
    const std::lock_guard<std::mutex> lock(all.mutex);
    for (ProcessGroupFastcoll* group : all.groups) {
      const auto device = group->device_->made();
      if (group->engine_->faulted() || (device != nullptr && device->faulted())) {
        failed.push_back(group->traceGroup());
      }
    }
  }
  for (const auto group : failed) trace::groupFailed(group);  // writes a file, hence no lock
}

/// Adds the group at its first call: torch sets the description after the constructor.
std::uint32_t ProcessGroupFastcoll::traceGroup() {
  if (const auto known = traceGroup_.load(std::memory_order_acquire); known != 0) return known;
  if (!trace::isOn()) return 0;
  const std::lock_guard<std::mutex> lock(traceMutex_);
  if (traceGroup_ != 0) return traceGroup_;
  trace::Group group;
  group.name = name_;
  group.description = pg_desc_.empty() ? "undefined" : pg_desc_;
  group.rank = rank_;
  for (const auto rank : options_->global_ranks_in_group) {
    group.ranks.push_back(static_cast<int>(rank));
  }
  if (group.ranks.size() != static_cast<std::size_t>(size_)) {
    group.ranks.clear();
    for (int rank = 0; rank < size_; ++rank) group.ranks.push_back(rank);
  }
  traceGroup_.store(trace::addGroup(std::move(group)), std::memory_order_release);
  return traceGroup_;
}

// --- calls ---------------------------------------------------------------------------------------

void ProcessGroupFastcoll::describe(Call& call) {
  trace::Record& draft = call.draft;
  draft.group = traceGroup();
  if (draft.group == 0) return;
  draft.device = call.onDevice();
  const Request& request = call.parts.empty() ? call.request : call.parts[0];
  const CallType& type = *call.site.type;
  draft.name = type.traced;
  if (call.isMessage()) {
    const auto* const message = draft.device ? nullptr : &static_cast<const MessageCall&>(call);
    draft.lane = trace::Lane::Message;
    draft.sends = call.sends();
    draft.peer = message != nullptr ? message->peer : request.root;
    draft.tag = message != nullptr ? message->tag : 0;
    const at::Tensor& tensor = message != nullptr ? message->tensor : call.outputs[0];
    return add(draft.shapes, !draft.sends, TracedAs::Each, tensor);
  }
  draft.lane = draft.device ? trace::Lane::Device : trace::Lane::Collective;
  draft.op = request.op;
  draft.root = request.root;
  draft.timeoutMillis = timeoutOr(call.timeout).count();
  if (draft.device) draft.seq = ++deviceCalls_;
  add(draft.shapes, false, type.inputs, call.inputs, call.outputs, size_);
  add(draft.shapes, true, type.outputs, call.outputs, call.inputs, size_);
  trace::describe(draft);
}

/// Numbers a described message and records it.
trace::RecordId ProcessGroupFastcoll::recordMessage(trace::Record& draft) {
  if (draft.group == 0) return 0;
  draft.timeoutMillis = options_->timeout.count();
  if (draft.peer >= 0) {
    const int peer = static_cast<int>(draft.peer);
    draft.seq = messageNumbers_->next(draft.sends, peer, draft.tag, draft.device);
  }
  trace::describe(draft);
  return trace::record(draft, draft.seq);
}

trace::RecordId ProcessGroupFastcoll::tracedMonitoredBarrier(std::chrono::milliseconds timeout) {
  trace::Record record;
  record.group = traceGroup();
  if (record.group == 0) return 0;
  record.lane = trace::Lane::MonitoredBarrier;
  record.name = "barrier";
  record.seq = ++monitored_;
  record.timeoutMillis = timeout.count();
  trace::describe(record);
  return trace::record(record, record.seq, true);
}

}  // namespace fastcoll
