// Gradients of torch.ops.fastcoll. The gradient of an operator that returns a tensor is again a
// collective. An operator that writes into a tensor of the caller has none.
#include <ATen/ATen.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/library.h>

#include <array>
#include <string>

#include "base/error.hpp"
#include "bindings/operators.hpp"

namespace fastcoll::operators {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;
using Below = at::AutoDispatchBelowADInplaceOrView;
using Text = const std::string&;
using Splits = c10::SymIntArrayRef;

/// Calls an operator as torch does, with all that torch does around it, so a trace has it.
template <const char* kName, typename... Given>
at::Tensor call(const at::Tensor& input, Given... given) {
  static const auto op = c10::Dispatcher::singleton()
                             .findSchemaOrThrow(kName, "")
                             .typed<at::Tensor(const at::Tensor&, Given...)>();
  return op.call(input, given...);
}
constexpr char kAllReduce[] = "fastcoll::all_reduce";
constexpr char kAllGather[] = "fastcoll::all_gather";
constexpr char kReduceScatter[] = "fastcoll::reduce_scatter";
constexpr char kAllToAll[] = "fastcoll::all_to_all";
constexpr auto callAllReduce = &call<kAllReduce, Text, Text>;
constexpr auto callAllGather = &call<kAllGather, std::int64_t, Text>;
constexpr auto callReduceScatter = &call<kReduceScatter, Text, std::int64_t, Text>;
constexpr auto callAllToAll = &call<kAllToAll, Splits, Splits, Text>;

/// Throws for a tensor with a tangent, as forward-mode differentiation gives it.
bool differentiates(const at::Tensor& input) {
  if (input._fw_grad(0).defined()) {
    throw c10::NotImplementedError(
        {__func__, __FILE__, static_cast<std::uint32_t>(__LINE__)},
        "torch.ops.fastcoll: no forward-mode derivative. Use reverse mode, or detach the tensor.");
  }
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
    isMean("all_reduce", op);
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
  static at::Tensor forward(AutogradContext* context, const at::Tensor& input, std::int64_t size,
                            const std::string& group) {
    context->saved_data["size"] = size;
    context->saved_data["group"] = group;
    context->saved_data["scalar"] = input.dim() == 0;
    const Below below;
    return callAllGather(input, size, group);
  }
  static variable_list backward(AutogradContext* context, const variable_list& gradients) {
    at::Tensor own = callReduceScatter(gradients[0], "sum", context->saved_data["size"].toInt(),
                                       context->saved_data["group"].toStringRef());
    return {context->saved_data["scalar"].toBool() ? own.squeeze(0) : own, {}, {}};
  }
};

struct ReduceScatterGradient : torch::autograd::Function<ReduceScatterGradient> {
  static at::Tensor forward(AutogradContext* context, const at::Tensor& input,
                            const std::string& op, std::int64_t size, const std::string& group) {
    context->saved_data["mean"] = isMean("reduce_scatter", op);
    context->saved_data["size"] = size;
    context->saved_data["group"] = group;
    const Below below;
    return callReduceScatter(input, op, size, group);
  }
  static variable_list backward(AutogradContext* context, const variable_list& gradients) {
    const std::int64_t size = context->saved_data["size"].toInt();
    at::Tensor all = callAllGather(gradients[0], size, context->saved_data["group"].toStringRef());
    return {context->saved_data["mean"].toBool() ? all / size : all, {}, {}, {}};
  }
};

struct AllToAllGradient : torch::autograd::Function<AllToAllGradient> {
  static at::Tensor forward(AutogradContext* context, const at::Tensor& input, Splits received,
                            Splits sent, const std::string& group) {
    context->saved_data["received"] = received;
    context->saved_data["sent"] = sent;
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

/// The autograd kernel of an operator with a gradient.
template <typename Gradient, const char* kName, typename... Given>
at::Tensor differentiable(const at::Tensor& input, Given... given) {
  if (differentiates(input)) return Gradient::apply(input, given...);
  const Below below;
  return call<kName, Given...>(input, given...);
}

/// The autograd kernel of operators that write into a tensor of the caller: they have no gradient.
void withoutGradient(const c10::OperatorHandle& op, c10::DispatchKeySet keys,
                     torch::jit::Stack* stack) {
  const std::string& name = op.schema().name();  // fastcoll::all_reduce_
  for (const c10::IValue& argument : torch::jit::last(stack, op.schema().arguments().size())) {
    if (!argument.isTensor() || !differentiates(argument.toTensor())) continue;
    refuseCall(name.c_str() + name.rfind(':') + 1, "a tensor that requires no gradient",
               "one that does. Call the operator that returns a new tensor");
  }
  const at::AutoDispatchBelowAutograd below;
  op.redispatchBoxed(keys & c10::after_autograd_keyset, stack);
}

/// Counts the write, also in inference mode, so that autograd refuses what it saved of the tensor.
void countingWrite(const c10::OperatorHandle& op, c10::DispatchKeySet keys,
                   torch::jit::Stack* stack) {
  const auto& arguments = op.schema().arguments();
  at::Tensor written;
  for (std::size_t at = 0; at < arguments.size(); ++at) {
    const auto* alias = arguments[at].alias_info();
    if (alias == nullptr || !alias->isWrite()) continue;
    written = torch::jit::peek(stack, at, arguments.size()).toTensor();
  }
  {
    const Below below;
    op.redispatchBoxed(keys & c10::after_ADInplaceOrView_keyset, stack);
  }
  written.unsafeGetTensorImpl()->bump_version();
}

constexpr std::array kWriting{"all_reduce_", "all_gather_out", "reduce_scatter_out",
                              "all_to_all_out"};

}  // namespace

TORCH_LIBRARY_IMPL(fastcoll, Autograd, m) {
  m.impl("all_reduce", &differentiable<AllReduceGradient, kAllReduce, Text, Text>);
  m.impl("all_gather", &differentiable<AllGatherGradient, kAllGather, std::int64_t, Text>);
  m.impl("reduce_scatter",
         &differentiable<ReduceScatterGradient, kReduceScatter, Text, std::int64_t, Text>);
  m.impl("all_to_all", &differentiable<AllToAllGradient, kAllToAll, Splits, Splits, Text>);
  for (const char* name : kWriting) {
    m.impl(name, torch::CppFunction::makeFromBoxedFunction<&withoutGradient>());
  }
}

TORCH_LIBRARY_IMPL(fastcoll, ADInplaceOrView, m) {
  for (const char* name : kWriting) {
    m.impl(name, torch::CppFunction::makeFromBoxedFunction<&countingWrite>());
  }
}

}  // namespace fastcoll::operators
