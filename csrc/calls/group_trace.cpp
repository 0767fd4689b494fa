#include "calls/group_trace.hpp"

#include <ATen/ATen.h>

#include <algorithm>
#include <numeric>

#include "calls/message.hpp"

namespace fastcoll {
namespace {

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

GroupTrace::GroupTrace(const c10d::Backend& group, std::string name,
                       c10::intrusive_ptr<Options> options, const Settings& settings,
                       std::function<bool()> faulted)
    : group_(group), name_(std::move(name)), options_(std::move(options)) {
  trace::begin(settings, FASTCOLL_VERSION);
  const auto& ranks = options_->global_ranks_in_group;
  const std::size_t mine = group.getRank();
  trace::setRank(static_cast<int>(mine < ranks.size() ? ranks[mine] : mine));
  trace::watch(this, [this, faulted = std::move(faulted)] { return faulted() ? number() : 0; });
}

GroupTrace::~GroupTrace() {
  trace::unwatch(this);
  trace::endGroup(number_);
}

/// Adds the group at its first call: torch sets the description after the constructor.
std::uint32_t GroupTrace::number() {
  if (const auto known = number_.load(std::memory_order_acquire); known != 0) return known;
  if (!trace::isOn()) return 0;
  const std::lock_guard<std::mutex> lock(mutex_);
  if (number_ != 0) return number_;
  trace::Group group;
  group.name = name_;
  group.description = group_.getGroupDesc().empty() ? "undefined" : group_.getGroupDesc();
  group.rank = group_.getRank();
  for (const auto rank : options_->global_ranks_in_group) {
    group.ranks.push_back(static_cast<int>(rank));
  }
  const std::size_t size = group_.getSize();
  if (group.ranks.size() != size) {
    group.ranks.resize(size);
    std::iota(group.ranks.begin(), group.ranks.end(), 0);
  }
  number_.store(trace::addGroup(std::move(group)), std::memory_order_release);
  return number_;
}

// --- calls ---------------------------------------------------------------------------------------

void GroupTrace::describe(Call& call, std::chrono::milliseconds timeout) {
  trace::Record& draft = call.draft;
  draft.group = number();
  if (draft.group == 0) return;
  draft.device = call.onDevice();
  const Request& request = call.parts.empty() ? call.request : call.parts[0];
  const CallType& type = *call.site.type;
  draft.call = static_cast<std::uint32_t>(type.index);
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
  draft.timeoutMillis = timeout.count();
  add(draft.shapes, false, type.inputs, call.inputs, call.outputs, call.site.size);
  add(draft.shapes, true, type.outputs, call.outputs, call.inputs, call.site.size);
  trace::describe(draft);
}

trace::RecordId GroupTrace::onDevice(trace::Record& draft) {
  if (draft.lane == trace::Lane::Message) return message(draft);
  if (draft.group == 0) return 0;
  draft.seq = ++deviceCalls_;
  return trace::record(draft, draft.seq);
}

trace::RecordId GroupTrace::message(trace::Record& draft) {
  if (draft.group == 0) return 0;
  draft.timeoutMillis = options_->timeout.count();
  if (draft.peer >= 0) {
    const int peer = static_cast<int>(draft.peer);
    draft.seq = messageNumbers_->next(draft.sends, peer, draft.tag, draft.device);
  }
  trace::describe(draft);
  return trace::record(draft, draft.seq);
}

trace::RecordId GroupTrace::monitoredBarrier(std::chrono::milliseconds timeout) {
  trace::Record record;
  record.group = number();
  if (record.group == 0) return 0;
  record.lane = trace::Lane::MonitoredBarrier;
  record.call = static_cast<std::uint32_t>(calls::Barrier.index);
  record.seq = ++monitored_;
  record.timeoutMillis = timeout.count();
  trace::describe(record);
  return trace::record(record, record.seq, true);
}

}  // namespace fastcoll
