// torch.ops.fastcoll: collectives as operators of torch, for compiled graphs. Each is one call that
// has ended when it returns (on CUDA tensors: enqueued on the current stream), so a graph needs no
// wait_tensor and torch keeps no registry of works. A group is given by its name, and the result
// has the input's dtype and is contiguous. docs/guides/compile.md documents them.
//
// Every operator has a kernel and one for autograd: the gradient of a functional operator is again
// a collective, an operator that writes into a tensor of the caller has none.
// fastcoll/_operators.py has the shapes of results for tensors without data.
#include <ATen/ATen.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/library.h>
#include <torch/csrc/distributed/c10d/GroupRegistry.hpp>

#include <array>
#include <cctype>
#include <numeric>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "process_group.hpp"

namespace fastcoll::operators {
namespace {

using GroupRef = c10::intrusive_ptr<c10d::ProcessGroup>;

[[noreturn]] void refuseCall(const char* call, const std::string& expected,
                             const std::string& got) {
  throwAsTorch(Error(ErrorKind::Value,
                     concat("torch.ops.fastcoll.", call, ": expected ", expected, ", got ", got)));
}

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
  Target(const char* call, const std::string& name, const at::Tensor& tensor)
      : group(groupNamed(call, name)), backend(find(tensor)) {
    if (tensor.layout() != at::kStrided) {
      refuseCall(call, "a dense tensor", concat("one of layout ", c10::str(tensor.layout())));
    }
    if (backend != nullptr) return;
    refuseCall(call, concat("a group whose tensors on ", tensor.device().str(), " fastcoll serves"),
               concat("group '", name, "'"));
  }

  c10::intrusive_ptr<c10d::Backend> find(const at::Tensor& tensor) const {
    try {
      auto found = group->getBackend(tensor.device().type());
      return found->getBackendName() == "fastcoll" ? found : nullptr;
    } catch (const c10::Error&) {  // it has none for this device
      return nullptr;
    }
  }

  const GroupRef group;
  const c10::intrusive_ptr<c10d::Backend> backend;
};

void wait(const WorkRef& work) {
  if (work != nullptr) work->wait();
}

c10d::ReduceOp reduceOp(const char* call, const std::string& name) {
  static constexpr std::array<std::pair<std::string_view, c10d::ReduceOp::RedOpType>, 8> kOps{{
      {"sum", c10d::ReduceOp::SUM},
      {"avg", c10d::ReduceOp::AVG},
      {"product", c10d::ReduceOp::PRODUCT},
      {"min", c10d::ReduceOp::MIN},
      {"max", c10d::ReduceOp::MAX},
      {"band", c10d::ReduceOp::BAND},
      {"bor", c10d::ReduceOp::BOR},
      {"bxor", c10d::ReduceOp::BXOR},
  }};
  std::string lower = name;
  for (char& letter : lower) letter = static_cast<char>(std::tolower(letter));
  for (const auto& [known, op] : kOps) {
    if (known == lower) return op;
  }
  refuseCall(call, "a reduce_op of sum, avg, product, min, max, band, bor, bxor",
             concat("'", name, "'"));
}

// --- results -------------------------------------------------------------------------------------

at::Tensor resultOf(const at::Tensor& input, at::IntArrayRef sizes) {
  return at::empty(sizes, input.options());
}

at::Tensor gathered(const at::Tensor& input, int ranks) {
  auto sizes = input.sizes().vec();
  if (sizes.empty()) sizes.emplace_back(1);
  sizes[0] *= ranks;
  return resultOf(input, sizes);
}

at::Tensor scattered(const char* call, const at::Tensor& input, int ranks) {
  auto sizes = input.sizes().vec();
  if (sizes.empty() || sizes[0] % ranks != 0) {
    refuseCall(call, concat("an input whose first dimension is a multiple of ", ranks),
               c10::str(input.sizes()));
  }
  sizes[0] /= ranks;
  return resultOf(input, sizes);
}

/// `splits` are the rows that arrive from each rank; none means as many as are sent.
at::Tensor exchanged(const char* call, const at::Tensor& input, at::IntArrayRef splits) {
  auto sizes = input.sizes().vec();
  if (sizes.empty()) refuseCall(call, "an input of at least one dimension", "a scalar");
  if (!splits.empty()) {
    sizes[0] = std::accumulate(splits.begin(), splits.end(), std::int64_t{0});
  }
  return resultOf(input, sizes);
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
  at::Tensor result = resultOf(input, input.sizes());
  auto* const ours = dynamic_cast<ProcessGroupFastcoll*>(target.backend.get());
  if (ours != nullptr && input.is_cpu()) {
    wait(ours->allreduceInto(result, input, options));
    return result;
  }
  result.copy_(input);
  Tensors tensors{result};
  wait(target.backend->allreduce(tensors, options));
  return result;
}

void gatherInto(const char* call, at::Tensor output, at::Tensor input, const Target& target) {
  c10d::AllgatherOptions options;
  options.asyncOp = false;
  wait(target.backend->_allgather_base(output, input, options));
}

void allGatherInto(const at::Tensor& input, const std::string& group, const at::Tensor& out) {
  gatherInto("all_gather_out", out, input, Target("all_gather_out", group, input));
}

at::Tensor allGather(const at::Tensor& input, const std::string& group) {
  const Target target("all_gather", group, input);
  at::Tensor result = gathered(input, target.group->getSize());
  gatherInto("all_gather", result, input, target);
  return result;
}

void scatterInto(const char* call, at::Tensor output, at::Tensor input, const std::string& op,
                 const Target& target) {
  c10d::ReduceScatterOptions options;
  options.reduceOp = reduceOp(call, op);
  options.asyncOp = false;
  wait(target.backend->_reduce_scatter_base(output, input, options));
}

void reduceScatterInto(const at::Tensor& input, const std::string& op, const std::string& group,
                       const at::Tensor& out) {
  scatterInto("reduce_scatter_out", out, input, op, Target("reduce_scatter_out", group, input));
}

at::Tensor reduceScatter(const at::Tensor& input, const std::string& op, const std::string& group) {
  const Target target("reduce_scatter", group, input);
  at::Tensor result = scattered("reduce_scatter", input, target.group->getSize());
  scatterInto("reduce_scatter", result, input, op, target);
  return result;
}

void exchangeInto(const char* call, at::Tensor output, at::Tensor input, at::IntArrayRef received,
                  at::IntArrayRef sent, const Target& target) {
  c10d::AllToAllOptions options;
  options.asyncOp = false;
  auto outputSplits = received.vec();
  auto inputSplits = sent.vec();
  wait(target.backend->alltoall_base(output, input, outputSplits, inputSplits, options));
}

void allToAllInto(const at::Tensor& input, at::IntArrayRef received, at::IntArrayRef sent,
                  const std::string& group, const at::Tensor& out) {
  exchangeInto("all_to_all_out", out, input, received, sent,
               Target("all_to_all_out", group, input));
}

at::Tensor allToAll(const at::Tensor& input, c10::SymIntArrayRef received, c10::SymIntArrayRef sent,
                    const std::string& group) {
  const Target target("all_to_all", group, input);
  const auto outputSplits = C10_AS_INTARRAYREF_SLOW(received);
  at::Tensor result = exchanged("all_to_all", input, outputSplits);
  exchangeInto("all_to_all", result, input, outputSplits, C10_AS_INTARRAYREF_SLOW(sent), target);
  return result;
}

// --- autograd ------------------------------------------------------------------------------------

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;
using Below = at::AutoDispatchBelowADInplaceOrView;
using Splits = std::vector<c10::SymInt>;

/// The operator as torch calls it, with all that torch does around it: what traces a graph sees it.
template <typename Function>
auto operatorNamed(const char* name, Function*) {
  return c10::Dispatcher::singleton().findSchemaOrThrow(name, "").typed<Function>();
}

at::Tensor callAllReduce(const at::Tensor& input, const std::string& op, const std::string& group) {
  static const auto call = operatorNamed("fastcoll::all_reduce", &allReduce);
  return call.call(input, op, group);
}
at::Tensor callAllGather(const at::Tensor& input, const std::string& group) {
  static const auto call = operatorNamed("fastcoll::all_gather", &allGather);
  return call.call(input, group);
}
at::Tensor callReduceScatter(const at::Tensor& input, const std::string& op,
                             const std::string& group) {
  static const auto call = operatorNamed("fastcoll::reduce_scatter", &reduceScatter);
  return call.call(input, op, group);
}
at::Tensor callAllToAll(const at::Tensor& input, c10::SymIntArrayRef received,
                        c10::SymIntArrayRef sent, const std::string& group) {
  static const auto call = operatorNamed("fastcoll::all_to_all", &allToAll);
  return call.call(input, received, sent, group);
}

bool differentiates(const at::Tensor& input) {
  return at::GradMode::is_enabled() && input.requires_grad();
}

/// Whether the result is the mean; throws unless it is that or the sum, which have a gradient.
bool isMean(const char* call, const std::string& op) {
  const auto known = reduceOp(call, op);
  if (known == c10d::ReduceOp::AVG) return true;
  if (known == c10d::ReduceOp::SUM) return false;
  refuseCall(call, "a reduce_op of sum or avg for a tensor that requires a gradient",
             concat("'", op, "'. Call it under torch.no_grad()"));
}

/// The sum over the ranks of each rank's gradient.
struct AllReduceGradient : torch::autograd::Function<AllReduceGradient> {
  static at::Tensor forward(AutogradContext* context, const at::Tensor& input,
                            const std::string& op, const std::string& group) {
    context->saved_data["op"] = op;
    context->saved_data["group"] = group;
    const Below below;
    return callAllReduce(input, op, group);
  }
  static variable_list backward(AutogradContext* context, const variable_list& gradients) {
    return {callAllReduce(gradients[0], context->saved_data["op"].toStringRef(),
                          context->saved_data["group"].toStringRef()),
            {},
            {}};
  }
};

struct AllGatherGradient : torch::autograd::Function<AllGatherGradient> {
  static at::Tensor forward(AutogradContext* context, const at::Tensor& input,
                            const std::string& group) {
    context->saved_data["group"] = group;
    context->saved_data["scalar"] = input.dim() == 0;
    const Below below;
    return callAllGather(input, group);
  }
  static variable_list backward(AutogradContext* context, const variable_list& gradients) {
    at::Tensor own =
        callReduceScatter(gradients[0], "sum", context->saved_data["group"].toStringRef());
    return {context->saved_data["scalar"].toBool() ? own.squeeze(0) : own, {}};
  }
};

struct ReduceScatterGradient : torch::autograd::Function<ReduceScatterGradient> {
  static at::Tensor forward(AutogradContext* context, const at::Tensor& input,
                            const std::string& op, const std::string& group) {
    context->saved_data["mean"] = isMean("reduce_scatter", op);
    context->saved_data["group"] = group;
    const Below below;
    return callReduceScatter(input, op, group);
  }
  static variable_list backward(AutogradContext* context, const variable_list& gradients) {
    const std::string& group = context->saved_data["group"].toStringRef();
    at::Tensor all = callAllGather(gradients[0], group);
    if (context->saved_data["mean"].toBool()) {
      all = all / groupNamed("reduce_scatter", group)->getSize();
    }
    return {all, {}, {}};
  }
};

struct AllToAllGradient : torch::autograd::Function<AllToAllGradient> {
  static at::Tensor forward(AutogradContext* context, const at::Tensor& input,
                            const Splits& received, const Splits& sent, const std::string& group) {
    context->saved_data["received"] = c10::SymIntArrayRef(received);
    context->saved_data["sent"] = c10::SymIntArrayRef(sent);
    context->saved_data["group"] = group;
    const Below below;
    return callAllToAll(input, received, sent, group);
  }
  static variable_list backward(AutogradContext* context, const variable_list& gradients) {
    const auto received = context->saved_data["received"].toSymIntVector();
    const auto sent = context->saved_data["sent"].toSymIntVector();
    return {callAllToAll(gradients[0], sent, received, context->saved_data["group"].toStringRef()),
            {},
            {},
            {}};
  }
};

at::Tensor allReduceAutograd(const at::Tensor& input, const std::string& op,
                             const std::string& group) {
  if (differentiates(input)) {
    isMean("all_reduce", op);
    return AllReduceGradient::apply(input, op, group);
  }
  const Below below;
  return callAllReduce(input, op, group);
}

at::Tensor allGatherAutograd(const at::Tensor& input, const std::string& group) {
  if (differentiates(input)) return AllGatherGradient::apply(input, group);
  const Below below;
  return callAllGather(input, group);
}

at::Tensor reduceScatterAutograd(const at::Tensor& input, const std::string& op,
                                 const std::string& group) {
  if (differentiates(input)) return ReduceScatterGradient::apply(input, op, group);
  const Below below;
  return callReduceScatter(input, op, group);
}

at::Tensor allToAllAutograd(const at::Tensor& input, c10::SymIntArrayRef received,
                            c10::SymIntArrayRef sent, const std::string& group) {
  if (differentiates(input)) {
    return AllToAllGradient::apply(input, received.vec(), sent.vec(), group);
  }
  const Below below;
  return callAllToAll(input, received, sent, group);
}

/// An operator that writes into `written`, a tensor of the caller, and reads `input`.
void writing(const c10::OperatorHandle& op, c10::DispatchKeySet keys, torch::jit::Stack* stack) {
  const auto& schema = op.schema();
  const std::string& name = schema.name();  // fastcoll::all_reduce_
  at::Tensor written;
  const auto arguments = torch::jit::last(stack, schema.arguments().size());
  for (std::size_t at = 0; at < arguments.size(); ++at) {
    if (!arguments[at].isTensor()) continue;
    const at::Tensor& tensor = arguments[at].toTensor();
    if (differentiates(tensor)) {
      refuseCall(name.c_str() + name.rfind(':') + 1, "a tensor that requires no gradient",
                 "one that does. Call the operator that returns a new tensor");
    }
    const auto* alias = schema.arguments()[at].alias_info();
    if (alias != nullptr && alias->isWrite()) written = tensor;
  }
  {
    const Below below;
    op.callBoxed(stack);
  }
  if (!written.is_inference()) written.unsafeGetTensorImpl()->bump_version();
}

}  // namespace

TORCH_LIBRARY(fastcoll, m) {
  m.set_python_module("fastcoll._operators");  // has their results without data
  const std::vector<at::Tag> tags{at::Tag::pt2_compliant_tag};
  m.def("all_reduce(Tensor input, str reduce_op, str group_name) -> Tensor", tags);
  m.def("all_reduce_(Tensor(a!) tensor, str reduce_op, str group_name) -> ()", tags);
  m.def("all_gather(Tensor input, str group_name) -> Tensor", tags);
  m.def("all_gather_out(Tensor input, str group_name, *, Tensor(a!) out) -> ()", tags);
  m.def("reduce_scatter(Tensor input, str reduce_op, str group_name) -> Tensor", tags);
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
  m.impl("all_reduce", &allReduceAutograd);
  m.impl("all_gather", &allGatherAutograd);
  m.impl("reduce_scatter", &reduceScatterAutograd);
  m.impl("all_to_all", &allToAllAutograd);
  for (const char* name :
       {"all_reduce_", "all_gather_out", "reduce_scatter_out", "all_to_all_out"}) {
    m.impl(name, torch::CppFunction::makeFromBoxedFunction<&writing>());
  }
}

}  // namespace fastcoll::operators
