// Records the groups and calls of ProcessGroupFastcoll in the trace. Each call has the name, sizes
// and dtypes that torch's analyser expects of a correct one.
#include <ATen/ATen.h>

#include <algorithm>
#include <mutex>
#include <vector>

#include "base/fork.hpp"
#include "process_group.hpp"

namespace fastcoll {
namespace {

using Tensors = ProcessGroupFastcoll::Tensors;

// Groups that the trace's thread polls. Raw pointers, because that thread must never drop the last
// reference to a group.
struct Watched {
  const std::uint64_t generation = forkGeneration();
  std::mutex mutex;
  std::vector<ProcessGroupFastcoll*> groups;
};

/// The groups of this process. A forked child begins with none, and with an unlocked mutex.
Watched& watched() {
  static std::atomic<Watched*> known{nullptr};
  Watched* now = known.load(std::memory_order_acquire);
  if (now == nullptr || now->generation != forkGeneration()) {
    auto* const fresh = new Watched;  // outlives static destructors
    if (known.compare_exchange_strong(now, fresh, std::memory_order_acq_rel)) return *fresh;
    delete fresh;
  }
  return *now;
}

void add(trace::Shapes& shapes, bool output, const at::Tensor& tensor, std::int64_t parts = 0) {
  const auto sizes = tensor.sizes();
  shapes.add(output, dtypeOf(tensor.scalar_type()), sizes.data(), sizes.size(), parts);
}

void addAll(trace::Shapes& shapes, bool output, const Tensors& tensors) {
  for (const auto& tensor : tensors) add(shapes, output, tensor);
}

bool equalCounts(const Tensors& tensors) {
  return std::all_of(tensors.begin(), tensors.end(),
                     [&](const auto& one) { return one.numel() == tensors[0].numel(); });
}

/// Adds a list with a tensor for each rank, as one tensor with one more dimension.
void addList(trace::Shapes& shapes, bool output, const Tensors& list, std::size_t ranks) {
  if (list.size() == ranks && ranks > 0 && equalCounts(list)) {
    add(shapes, output, list[0], static_cast<std::int64_t>(ranks));
  } else {
    addAll(shapes, output, list);
  }
}

/// Adds a list with a tensor for each rank, as its total number of elements.
void addTotal(trace::Shapes& shapes, bool output, const Tensors& list) {
  std::int64_t total = 0;
  for (const auto& tensor : list) total += tensor.numel();
  const auto dtype = list.empty() ? DType::UInt8 : dtypeOf(list[0].scalar_type());
  shapes.add(output, dtype, &total, 1);
}

/// Fills in the call's name and shapes. In a correct call the sizes must be equal on all ranks. The
/// analyser makes exceptions for scatter, gather and all_to_all.
void setShapes(trace::Record& record, c10d::OpType type, const Tensors& in, const Tensors& out,
               std::size_t ranks) {
  trace::Shapes& shapes = record.shapes;
  using c10d::OpType;
  switch (type) {
    case OpType::ALLREDUCE:
    case OpType::_ALLREDUCE_SPARSE:
      record.name = "all_reduce";
      break;
    case OpType::ALLREDUCE_COALESCED:
      record.name = "allreduce_coalesced";
      break;
    case OpType::BROADCAST:
      record.name = "broadcast";
      break;
    case OpType::REDUCE:
      record.name = "reduce";
      break;
    case OpType::ALLGATHER: {
      const bool even = equalCounts(out);
      record.name = even ? "all_gather" : "all_gather_v";
      // Uneven inputs differ between ranks, so record the outputs, which all ranks have.
      even ? addAll(shapes, false, in) : addAll(shapes, false, out);
      return addList(shapes, true, out, ranks);
    }
    case OpType::_ALLGATHER_BASE:
      record.name = "_all_gather_base";
      break;
    case OpType::ALLGATHER_COALESCED:
      record.name = "all_gather_into_tensor_coalesced";
      addAll(shapes, false, in);
      if (out.size() == in.size()) return addAll(shapes, true, out);
      for (const auto& one : in) add(shapes, true, one, static_cast<std::int64_t>(ranks));
      return;
    case OpType::GATHER:
      record.name = "gather";
      addAll(shapes, false, in);
      return addList(shapes, true, out, ranks);
    case OpType::SCATTER:
      record.name = "scatter";
      addList(shapes, false, in, ranks);
      return addAll(shapes, true, out);
    case OpType::REDUCE_SCATTER: {
      if (in.size() == out.size() && ranks > 1) {
        record.name = "reduce_scatter_tensor_coalesced";
        break;
      }
      const bool even = equalCounts(in);
      record.name = even ? "reduce_scatter" : "reduce_scatter_v";
      addList(shapes, false, in, ranks);
      return even ? addAll(shapes, true, out) : addAll(shapes, true, in);
    }
    case OpType::_REDUCE_SCATTER_BASE:
      record.name = "_reduce_scatter_base";
      break;
    case OpType::ALLTOALL:
      record.name = "all_to_all";
      addTotal(shapes, false, in);
      return addTotal(shapes, true, out);
    case OpType::ALLTOALL_BASE:
      record.name = "all_to_all";
      break;
    default:
      record.name = "barrier";
  }
  addAll(shapes, false, in);
  addAll(shapes, true, out);
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
  trace::setLook(&lookAtGroups);
}

void ProcessGroupFastcoll::endTrace() {
  auto& all = watched();
  {
    const std::lock_guard<std::mutex> lock(all.mutex);
    all.groups.erase(std::remove(all.groups.begin(), all.groups.end(), this), all.groups.end());
  }
  trace::endGroup(traceGroup_);
}

void ProcessGroupFastcoll::lookAtGroups() {
  std::vector<std::uint32_t> failed;
  {
    auto& all = watched();
    const std::lock_guard<std::mutex> lock(all.mutex);
    for (ProcessGroupFastcoll* group : all.groups) {
      const auto device = group->device();
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

void ProcessGroupFastcoll::describe(trace::Record& draft, const TensorTask& task, const Call& call,
                                    bool device) {
  draft.group = traceGroup();
  if (draft.group == 0) return;
  const Request& request = task.parts.empty() ? task.request : task.parts[0];
  draft.lane = device ? trace::Lane::Device : trace::Lane::Collective;
  draft.device = device;
  draft.op = request.op;
  draft.root = request.root;
  draft.timeoutMillis = timeoutOr(call.timeout).count();
  if (device) draft.seq = ++deviceCalls_;
  setShapes(draft, call.type, call.inputs, call.outputs, size_);
  trace::describe(draft);
}

trace::RecordId ProcessGroupFastcoll::tracedMessage(const char* name, const at::Tensor& tensor,
                                                    bool send, int peer, int tag, bool device) {
  trace::Record record;
  record.group = traceGroup();
  if (record.group == 0 || !tensor.defined()) return 0;
  record.lane = trace::Lane::Message;
  record.device = device;
  record.name = name;
  record.sends = send;
  record.peer = peer;
  record.tag = tag;
  record.timeoutMillis = options_->timeout.count();
  if (peer >= 0) record.seq = messageNumbers_->next(send, peer, tag, device);
  add(record.shapes, !send, tensor);
  trace::describe(record);
  return trace::record(record, record.seq);
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
