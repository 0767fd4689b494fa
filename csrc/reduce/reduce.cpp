// Selects the instruction set once, returns its kernels, and explains in an error why one is
// missing.
#include "reduce/reduce.hpp"

#include <atomic>
#include <cstring>

#if defined(__x86_64__)
#include <cpuid.h>
#endif

#include "base/error.hpp"
#include "reduce/isa.hpp"

namespace fastcoll {
namespace {

struct Isa {
  const char* name;
  const IsaKernels* kernels;
  bool (*available)();
};

#if defined(__x86_64__)
// Older compilers do not accept "f16c" as a name. A system that saves AVX registers saves these.
bool cpuHasF16c() {
  unsigned a, b, c, d;
  return __get_cpuid(1, &a, &b, &c, &d) != 0 && (c & (1u << 29)) != 0;
}

bool cpuHasAvx2() {
  __builtin_cpu_init();
  return __builtin_cpu_supports("avx2") && cpuHasF16c();
}

bool cpuHasAvx512() {
  return cpuHasAvx2() && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
         __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq");
}
#endif

// Best first.
const Isa kIsas[] = {
#if defined(__x86_64__)
    {"avx512", &kernelsAvx512, cpuHasAvx512},
    {"avx2", &kernelsAvx2, cpuHasAvx2},
#endif
    {"baseline", &kernelsBaseline, [] { return true; }},
};

const Isa* bestIsa() {
  const Isa* isa = kIsas;
  while (!isa->available()) ++isa;
  return isa;
}

std::atomic<const Isa*>& currentIsa() {
  static std::atomic<const Isa*> isa{bestIsa()};
  return isa;
}

const IsaKernels& kernels() {
  return *currentIsa().load(std::memory_order_relaxed)->kernels;
}

std::string whyNot(DType dtype, ReduceOp op) {
  const char* type = dtypeName(dtype);
  const char* name = reduceOpName(op);
  if (!infoOf(dtype).summed) {
    const char* to = dtype == DType::Complex32 ? "complex64" : "bfloat16 or float32";
    if (dtype == DType::Opaque)
      return concat(type, " can be moved but not reduced; reduce a tensor of a numeric type");
    return concat(type, " can be moved but not reduced; cast to ", to, " first");
  }
  switch (op) {
    case ReduceOp::Avg:
      return concat(name, " is not defined for ", type, "; use SUM and divide");
    case ReduceOp::PreMulSum:
      return concat(name, " is not defined for ", type, "; multiply the tensor and use SUM");
    case ReduceOp::Min:
    case ReduceOp::Max:
      return concat(
          name, " is not defined for ", type,
          ", which has no order; reduce the parts (torch.view_as_real) or the absolute values");
    case ReduceOp::BitAnd:
    case ReduceOp::BitOr:
    case ReduceOp::BitXor:
      if (isFloating(dtype) || isComplex(dtype)) {
        return concat(name, " is not defined for ", type,
                      "; reduce an integer view of the tensor, such as tensor.view(torch.uint8)");
      }
      break;
    default:
      break;
  }
  return concat("no reduction ", name, " for ", type, "; choose one of SUM, PRODUCT, MIN and MAX");
}

}  // namespace

ReduceFn reduceFunction(DType dtype, ReduceOp op) {
  // A table may lack rare operations; a machine that can run it can run those after it.
  for (const Isa* isa = currentIsa().load(std::memory_order_relaxed); isa != std::end(kIsas); ++isa)
    if (ReduceFn fn = isa->kernels->reduction(dtype, op)) return fn;
  throw Error(ErrorKind::Value, whyNot(dtype, op));
}

SquaresFn squaresFunction(DType dtype) {
  if (SquaresFn fn = kernels().squares(partOf(dtype))) return fn;
  throw Error(ErrorKind::Type,
              "expected floating-point numbers whose squares are to be summed, got ",
              dtypeName(dtype), "; leave the statistics out");
}

const WireCast& wireCast(DType wire) {
  if (wire == DType::BFloat16) return kernels().bfloat16;
  if (wire == DType::Float16) return kernels().float16;
  throw Error(ErrorKind::Type, "expected a wire dtype of bfloat16 or float16, got ",
              dtypeName(wire), "; cast before and after the collective");
}

DigestFn digestFunction() noexcept {
  return kernels().digest;
}

const char* reduceIsa() {
  return currentIsa().load(std::memory_order_relaxed)->name;
}

void setReduceIsa(const char* name) {
  for (const Isa& isa : kIsas) {
    if (std::strcmp(isa.name, name) != 0) continue;
    if (!isa.available())
      throw Error(ErrorKind::Value, "this machine cannot run the ", name, " reductions");
    currentIsa().store(&isa, std::memory_order_relaxed);
    return;
  }
  throw Error(ErrorKind::Value, "no reductions are built for \"", name, "\"; this build has ",
              kIsas[0].name, " to baseline");
}

}  // namespace fastcoll
