// torch.ops.fastcoll: collectives as operators of torch, for compiled graphs. Each is one call that
// has ended when it returns (on CUDA tensors: enqueued on the current stream), so a graph needs no
// wait_tensor and torch keeps no registry of works. A group is given by its name, and the result
// has the input's dtype and is contiguous. docs/guides/compile.md documents them.
//
// No operator has a gradient: the pass of fastcoll/_compile.py runs behind autograd.
// fastcoll/_operators.py has the shapes of results for tensors without data.
#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>
#include <torch/library.h>
#include <torch/csrc/distributed/c10d/GroupRegistry.hpp>

#include <strings.h>

#include <array>
#include <numeric>
#include <vector>

#include "process_group.hpp"

namespace fastcoll::operators {
namespace {

/// Throws ValueError: "torch.ops.fastcoll.all_reduce: expected ..., got ...".
[[noreturn]] void refuseCall(const char* call, const std::string& expected,
                             const std::string& got) {
  throwAsTorch(
      Error(ErrorKind::Value, "torch.ops.fastcoll.", call, ": expected ", expected, ", got ", got));
}

// The two count alike.
static_assert(static_cast<int>(ReduceOp::BitXor) == c10d::ReduceOp::BXOR);

c10d::ReduceOp reduceOp(const char* call, const std::string& name) {
  for (int op = c10d::ReduceOp::SUM; op <= c10d::ReduceOp::BXOR; ++op) {
    if (::strcasecmp(reduceOpName(static_cast<ReduceOp>(op)), name.c_str()) == 0) {
      return static_cast<c10d::ReduceOp::RedOpType>(op);
    }
  }
  refuseCall(call, "a reduce_op of sum, avg, product, min, max, band, bor, bxor",
             concat("'", name, "'"));
}

using GroupRef = c10::intrusive_ptr<c10d::ProcessGroup>;

GroupRef groupNamed(const char* call, const std::string& name) {
  try {
    return c10d::resolve_process_group(name);
  } catch (const c10::Error&) {
    refuseCall(call, "the name of a process group (group.group_name)", concat("'", name, "'"));
  }
}

/// Fastcoll's backend of a group for a tensor. With TORCH_DISTRIBUTED_DEBUG=DETAIL torch's wrapper
/// of it.
struct Target {
  Target(const char* of, const std::string& name, const at::Tensor& tensor)
      : call(of),
        group(groupNamed(call, name)),
        backend(find(tensor)),
        ours(dynamic_cast<ProcessGroupFastcoll*>(backend.get())) {
    if (tensor.layout() != at::kStrided) {
      refuseCall(call, "a dense tensor", concat("one of layout ", c10::str(tensor.layout())));
    }
    if (backend == nullptr) {
      refuseCall(call,
                 concat("a group whose tensors on ", tensor.device().str(), " fastcoll serves"),
                 concat("group '", name, "'"));
    }
    if (ours != nullptr && ours->collects()) {
      refuseCall(call, "a call outside of a coalescing manager",
                 "one inside. Call torch.distributed's functions there");
    }
  }
  /// The size that the graph was compiled for; another one would need other code.
  int size(std::int64_t given) const {
    if (given == group->getSize()) return group->getSize();
    refuseCall(call, concat("a group_size of ", group->getSize(), ", that of the group"),
               concat(given));
  }

  c10::intrusive_ptr<c10d::Backend> find(const at::Tensor& tensor) const {
    try {
      auto found = group->getBackend(tensor.device().type());
      return found->getBackendName() == "fastcoll" ? found : nullptr;
    } catch (const c10::Error&) {  // it has none for this device
      return nullptr;
    }
  }

  const char* const call;
  const GroupRef group;
  const c10::intrusive_ptr<c10d::Backend> backend;
  ProcessGroupFastcoll* const ours;  // nullptr: wrapped
};

void wait(const WorkRef& work) {
  if (work != nullptr) work->wait();
}

// --- kernels on data -----------------------------------------------------------------------------

c10d::AllreduceOptions allReduceOptions(const char* call, const std::string& op) {
  c10d::AllreduceOptions options;
  options.reduceOp = reduceOp(call, op);
  options.asyncOp = false;
  return options;
}

void allReduceInPlace(const at::Tensor& tensor, const std::string& op, const std::string& group) {
  const Target target("all_reduce_", group, tensor);
  Tensors tensors{tensor};
  wait(target.backend->allreduce(tensors, allReduceOptions("all_reduce_", op)));
}

at::Tensor allReduce(const at::Tensor& input, const std::string& op, const std::string& group) {
  const Target target("all_reduce", group, input);
  const auto options = allReduceOptions("all_reduce", op);
  at::Tensor result = at::empty(input.sizes(), input.options());
  if (target.ours != nullptr && input.is_cpu()) {
    wait(target.ours->launch(&Doors::allReduceInto, result, input, options));
    return result;
  }
  result.copy_(input);
  Tensors tensors{result};
  wait(target.backend->allreduce(tensors, options));
  return result;
}

void gatherInto(const Target& target, at::Tensor output, at::Tensor input) {
  c10d::AllgatherOptions options;
  options.asyncOp = false;
  wait(target.backend->_allgather_base(output, input, options));
}

void allGatherInto(const at::Tensor& input, const std::string& group, const at::Tensor& out) {
  gatherInto(Target("all_gather_out", group, input), out, input);
}

at::Tensor allGather(const at::Tensor& input, std::int64_t size, const std::string& group) {
  const Target target("all_gather", group, input);
  auto sizes = input.sizes().vec();
  if (sizes.empty()) sizes.emplace_back(1);
  sizes[0] *= target.size(size);
  at::Tensor result = at::empty(sizes, input.options());
  gatherInto(target, result, input);
  return result;
}

void scatterInto(const Target& target, at::Tensor output, at::Tensor input, const std::string& op) {
  c10d::ReduceScatterOptions options;
  options.reduceOp = reduceOp(target.call, op);
  options.asyncOp = false;
  wait(target.backend->_reduce_scatter_base(output, input, options));
}

void reduceScatterInto(const at::Tensor& input, const std::string& op, const std::string& group,
                       const at::Tensor& out) {
  scatterInto(Target("reduce_scatter_out", group, input), out, input, op);
}

at::Tensor reduceScatter(const at::Tensor& input, const std::string& op, std::int64_t size,
                         const std::string& group) {
  const Target target("reduce_scatter", group, input);
  const int ranks = target.size(size);
  auto sizes = input.sizes().vec();
  if (sizes.empty() || sizes[0] % ranks != 0) {
    refuseCall(target.call, concat("an input whose first dimension is a multiple of ", ranks),
               c10::str(input.sizes()));
  }
  sizes[0] /= ranks;
  at::Tensor result = at::empty(sizes, input.options());
  scatterInto(target, result, input, op);
  return result;
}

void exchangeInto(const Target& target, at::Tensor output, at::Tensor input,
                  at::IntArrayRef received, at::IntArrayRef sent) {
  c10d::AllToAllOptions options;
  options.asyncOp = false;
  auto outputSplits = received.vec();
  auto inputSplits = sent.vec();
  wait(target.backend->alltoall_base(output, input, outputSplits, inputSplits, options));
}

void allToAllInto(const at::Tensor& input, at::IntArrayRef received, at::IntArrayRef sent,
                  const std::string& group, const at::Tensor& out) {
  exchangeInto(Target("all_to_all_out", group, input), out, input, received, sent);
}

at::Tensor allToAll(const at::Tensor& input, c10::SymIntArrayRef received, c10::SymIntArrayRef sent,
                    const std::string& group) {
  const Target target("all_to_all", group, input);
  const auto splits = C10_AS_INTARRAYREF_SLOW(received);  // rows; none: as many as are sent
  auto sizes = input.sizes().vec();
  if (sizes.empty()) refuseCall(target.call, "an input of at least one dimension", "a scalar");
  if (!splits.empty()) sizes[0] = std::accumulate(splits.begin(), splits.end(), std::int64_t{0});
  at::Tensor result = at::empty(sizes, input.options());
  exchangeInto(target, result, input, splits, C10_AS_INTARRAYREF_SLOW(sent));
  return result;
}

// --- for autograd --------------------------------------------------------------------------------

/// Refuses tensors that require a gradient. Results would silently have none.
void refuseGradients(const c10::OperatorHandle& op, c10::DispatchKeySet keys,
                     torch::jit::Stack* stack) {
  const bool records = at::GradMode::is_enabled();
  for (const c10::IValue& argument : torch::jit::last(stack, op.schema().arguments().size())) {
    if (!argument.isTensor()) continue;
    const at::Tensor& tensor = argument.toTensor();
    const bool hasTangent = tensor._fw_grad(0).defined();  // of forward-mode differentiation
    if (!hasTangent && !(records && tensor.requires_grad())) continue;
    const std::string& name = op.schema().name();  // fastcoll::all_reduce
    refuseCall(name.c_str() + name.rfind(':') + 1, "a tensor that requires no gradient",
               "one that does. To train, give fastcoll.compile a model with DTensor or functional "
               "collectives. Else call the operator under torch.no_grad()");
  }
  const at::AutoDispatchBelowAutograd below;
  op.redispatchBoxed(keys & c10::after_autograd_keyset, stack);
}

/// Counts the write, also in inference mode, so that autograd refuses what it saved of the tensor.
void countWrite(const c10::OperatorHandle& op, c10::DispatchKeySet keys, torch::jit::Stack* stack) {
  const auto& arguments = op.schema().arguments();
  at::Tensor written;
  for (std::size_t at = 0; at < arguments.size(); ++at) {
    const auto* alias = arguments[at].alias_info();
    if (alias == nullptr || !alias->isWrite()) continue;
    written = torch::jit::peek(stack, at, arguments.size()).toTensor();
  }
  {
    const at::AutoDispatchBelowADInplaceOrView below;
    op.redispatchBoxed(keys & c10::after_ADInplaceOrView_keyset, stack);
  }
  written.unsafeGetTensorImpl()->bump_version();
}

constexpr std::array kReturning{"all_reduce", "all_gather", "reduce_scatter", "all_to_all"};
constexpr std::array kWriting{"all_reduce_", "all_gather_out", "reduce_scatter_out",
                              "all_to_all_out"};

}  // namespace

TORCH_LIBRARY(fastcoll, m) {
  m.set_python_module("fastcoll._operators");  // has their results without data
  const std::vector<at::Tag> tags{at::Tag::pt2_compliant_tag};
  m.def("all_reduce(Tensor input, str reduce_op, str group_name) -> Tensor", tags);
  m.def("all_reduce_(Tensor(a!) tensor, str reduce_op, str group_name) -> ()", tags);
  m.def("all_gather(Tensor input, int group_size, str group_name) -> Tensor", tags);
  m.def("all_gather_out(Tensor input, str group_name, *, Tensor(a!) out) -> ()", tags);
  m.def("reduce_scatter(Tensor input, str reduce_op, int group_size, str group_name) -> Tensor",
        tags);
  m.def("reduce_scatter_out(Tensor input, str reduce_op, str group_name, *, Tensor(a!) out) -> ()",
        tags);
  m.def(
      "all_to_all(Tensor input, SymInt[] output_splits, SymInt[] input_splits, str group_name)"
      " -> Tensor",
      tags);
  m.def(
      "all_to_all_out(Tensor input, int[] output_splits, int[] input_splits, str group_name, *,"
      " Tensor(a!) out) -> ()",
      tags);
}

TORCH_LIBRARY_IMPL(fastcoll, CompositeExplicitAutograd, m) {
  m.impl("all_reduce", &allReduce);
  m.impl("all_reduce_", &allReduceInPlace);
  m.impl("all_gather", &allGather);
  m.impl("all_gather_out", &allGatherInto);
  m.impl("reduce_scatter", &reduceScatter);
  m.impl("reduce_scatter_out", &reduceScatterInto);
  m.impl("all_to_all", &allToAll);
  m.impl("all_to_all_out", &allToAllInto);
}

TORCH_LIBRARY_IMPL(fastcoll, Autograd, m) {
  for (const auto& names : {kReturning, kWriting}) {
    for (const char* name : names) {
      m.impl(name, torch::CppFunction::makeFromBoxedFunction<&refuseGradients>());
    }
  }
}

TORCH_LIBRARY_IMPL(fastcoll, ADInplaceOrView, m) {
  for (const char* name : kWriting) {
    m.impl(name, torch::CppFunction::makeFromBoxedFunction<&countWrite>());
  }
}

}  // namespace fastcoll::operators
