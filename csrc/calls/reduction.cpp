#include "calls/reduction.hpp"

#include <ATen/ATen.h>

#include "base/entry_lock.hpp"
#include "calls/checks.hpp"
#include "reduce/reduce.hpp"

namespace fastcoll {
namespace {

// torch counts its operations alike; bindings/operators.cpp uses that too.
constexpr bool isAlike(ReduceOp ours, c10d::ReduceOp::RedOpType theirs) {
  return static_cast<int>(ours) == theirs;
}
static_assert(isAlike(ReduceOp::Sum, c10d::ReduceOp::SUM));
static_assert(isAlike(ReduceOp::Avg, c10d::ReduceOp::AVG));
static_assert(isAlike(ReduceOp::Product, c10d::ReduceOp::PRODUCT));
static_assert(isAlike(ReduceOp::Min, c10d::ReduceOp::MIN));
static_assert(isAlike(ReduceOp::Max, c10d::ReduceOp::MAX));
static_assert(isAlike(ReduceOp::BitAnd, c10d::ReduceOp::BAND));
static_assert(isAlike(ReduceOp::BitOr, c10d::ReduceOp::BOR));
static_assert(isAlike(ReduceOp::BitXor, c10d::ReduceOp::BXOR));
static_assert(isAlike(ReduceOp::PreMulSum, c10d::ReduceOp::PREMUL_SUM));

void setFactor(Call& call, Request& request, const c10d::ReduceOp& op) {
  const auto* supplement = dynamic_cast<const c10d::NCCLPreMulSumSupplement*>(op.supplement_.get());
  if (supplement == nullptr) {
    refuse(call.site, "PREMUL_SUM with a factor",
           "none. Make the operation with torch's _make_nccl_premul_sum(factor).");
  }
  const at::Tensor& factor = supplement->tensor_factor;
  if (!factor.defined()) {
    request.factor = supplement->double_factor;
  } else if (!call.onDevice() || factor.device() != *call.device()) {
    beforeWait();  // it may be on a device
    request.factor = factor.item<double>();
  } else {
    // The library reads it on the device, so the host need not wait for it.
    const DType type = partOf(request.dtype);
    if (factor.numel() != 1 || dtypeOf(factor.scalar_type()) != type) {
      throw Error(ErrorKind::Type, call.site.errorSite(), "expected a factor of one element of ",
                  dtypeName(type), ", got ", factor.numel(), " of ",
                  dtypeName(dtypeOf(factor.scalar_type())));
    }
    call.keepAlive(factor);
    request.factorOnDevice = factor.const_data_ptr();
  }
}

}  // namespace

void setReduction(Call& call, Request& request, const c10d::ReduceOp& op) {
  if (op.op_ > c10d::ReduceOp::PREMUL_SUM) {
    refuse(call.site,
           "a reduction of ReduceOp.SUM, AVG, PRODUCT, MIN, MAX, BAND, BOR, BXOR or PREMUL_SUM",
           concat("operation ", static_cast<int>(op.op_)));
  }
  request.op = static_cast<ReduceOp>(op.op_);
  if (request.op == ReduceOp::PreMulSum) setFactor(call, request, op);
  if (call.onDevice()) return;  // the library checks it
  request.kernel = named(call.site, [&] { return reduceFunction(request.dtype, request.op); });
}

Message setWire(const Call& call, Request& request, DType dtype, const Fusion& fusion) {
  request.dtype = fusion.wire ? dtypeOf(*fusion.wire) : dtype;
  if (request.dtype == dtype) return {};
  if (dtype != DType::Float32) {
    throw Error(ErrorKind::Type, call.site.errorSite(), "expected float32 tensors to travel as ",
                dtypeName(request.dtype), ", got ", dtypeName(dtype),
                ". Leave the wire dtype out, or cast the tensors.");
  }
  return Message(named(call.site, [&]() -> const WireCast& { return wireCast(request.dtype); }));
}

void setSquares(Call& call, DType dtype, const Fusion& fusion) {
  if (call.onDevice()) {
    refuse(call.site, "CPU tensors", concat("one on ", *call.device()));
  }
  if (!fusion.squares) return;
  const at::Tensor& squares = *fusion.squares;
  requireDense(call.site, squares);
  if (!squares.is_cpu() || squares.scalar_type() != at::kDouble || squares.numel() != 1) {
    refuse(call.site, "squares of one float64 element on the CPU",
           concat(squares.numel(), " of ", dtypeName(dtypeOf(squares.scalar_type())), " on ",
                  squares.device()));
  }
  named(call.site, [&] { squaresFunction(dtype); });
  squares.zero_();
  call.keepAlive(squares);
  call.request.squares = squares.mutable_data_ptr<double>();
}

}  // namespace fastcoll
