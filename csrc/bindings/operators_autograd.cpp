// Gradients of torch.ops.fastcoll. The gradient of an operator that returns a tensor is again a
// collective. An operator that writes into a tensor of the caller has none.
#include <ATen/ATen.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/library.h>

#include <array>
#include <string>
#include <vector>

#include "base/error.hpp"
#include "bindings/operators.hpp"

namespace fastcoll::operators {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;
using Below = at::AutoDispatchBelowADInplaceOrView;
using Splits = std::vector<c10::SymInt>;

/// The operator as torch calls it, with all that torch does around it, so a trace has it.
template <typename Function>
auto operatorNamed(const char* name) {
  return c10::Dispatcher::singleton().findSchemaOrThrow(name, "").typed<Function>();
}

at::Tensor callAllReduce(const at::Tensor& input, const std::string& op, const std::string& group) {
  static const auto call =
      operatorNamed<at::Tensor(const at::Tensor&, const std::string&, const std::string&)>(
          "fastcoll::all_reduce");
  return call.call(input, op, group);
}
at::Tensor callAllGather(const at::Tensor& input, std::int64_t size, const std::string& group) {
  static const auto call =
      operatorNamed<at::Tensor(const at::Tensor&, std::int64_t, const std::string&)>(
          "fastcoll::all_gather");
  return call.call(input, size, group);
}
at::Tensor callReduceScatter(const at::Tensor& input, const std::string& op, std::int64_t size,
                             const std::string& group) {
  static const auto call =
      operatorNamed<at::Tensor(const at::Tensor&, const std::string&, std::int64_t,
                               const std::string&)>("fastcoll::reduce_scatter");
  return call.call(input, op, size, group);
}
at::Tensor callAllToAll(const at::Tensor& input, c10::SymIntArrayRef received,
                        c10::SymIntArrayRef sent, const std::string& group) {
  static const auto call =
      operatorNamed<at::Tensor(const at::Tensor&, c10::SymIntArrayRef, c10::SymIntArrayRef,
                               const std::string&)>("fastcoll::all_to_all");
  return call.call(input, received, sent, group);
}

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

at::Tensor allGatherAutograd(const at::Tensor& input, std::int64_t size, const std::string& group) {
  if (differentiates(input)) return AllGatherGradient::apply(input, size, group);
  const Below below;
  return callAllGather(input, size, group);
}

at::Tensor reduceScatterAutograd(const at::Tensor& input, const std::string& op, std::int64_t size,
                                 const std::string& group) {
  if (differentiates(input)) return ReduceScatterGradient::apply(input, op, size, group);
  const Below below;
  return callReduceScatter(input, op, size, group);
}

at::Tensor allToAllAutograd(const at::Tensor& input, c10::SymIntArrayRef received,
                            c10::SymIntArrayRef sent, const std::string& group) {
  if (differentiates(input)) {
    return AllToAllGradient::apply(input, received.vec(), sent.vec(), group);
  }
  const Below below;
  return callAllToAll(input, received, sent, group);
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
  m.impl("all_reduce", &allReduceAutograd);
  m.impl("all_gather", &allGatherAutograd);
  m.impl("reduce_scatter", &reduceScatterAutograd);
  m.impl("all_to_all", &allToAllAutograd);
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
