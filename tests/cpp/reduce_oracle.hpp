// Expected results of csrc/reduce, one element at a time and by other methods: 16-bit floats are
// decoded with ldexp and rounded by comparing the two neighbours, and an average always divides.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>
#include <vector>

#include "base/dtype.hpp"

namespace oracle {

using fastcoll::DType;
using fastcoll::ReduceOp;

template <class T>
T fromBits(std::uint64_t bits) {
  T value;
  std::memcpy(&value, &bits, sizeof value);  // little endian
  return value;
}

/// A 16-bit float format with `fraction` bits of fraction.
struct Half {
  int fraction;
  int bias;

  std::uint32_t infinity() const { return 0x7fffu >> fraction << fraction; }

  double decode(std::uint32_t h) const {
    const std::uint32_t magnitude = h & 0x7fffu;
    const double sign = (h & 0x8000u) != 0 ? -1.0 : 1.0;
    const int exponent = static_cast<int>(magnitude >> fraction);
    const double mantissa = magnitude & ((1u << fraction) - 1);
    if (magnitude > infinity()) return std::nan("");
    if (magnitude == infinity()) return sign * HUGE_VAL;
    if (exponent == 0) return sign * std::ldexp(mantissa, 1 - bias - fraction);
    return sign * std::ldexp(mantissa + (1 << fraction), exponent - bias - fraction);
  }

  std::uint32_t encode(float value) const {
    if (std::isnan(value)) return infinity() | 1u << (fraction - 1);
    const std::uint32_t sign = std::signbit(value) ? 0x8000u : 0u;
    if (std::isinf(value)) return sign | infinity();
    const double magnitude = std::fabs(static_cast<double>(value));
    std::uint32_t low = 0, high = infinity();  // positive numbers are ordered as their bits are
    while (high - low > 1) {
      const std::uint32_t middle = (low + high) / 2;
      (decode(middle) <= magnitude ? low : high) = middle;
    }
    // Infinity represents the number that would follow the largest one.
    const double above = high == infinity()
                             ? std::ldexp(1.0, static_cast<int>(high >> fraction) - bias)
                             : decode(high);
    const double down = magnitude - decode(low), up = above - magnitude;
    const bool takeHigh = up < down || (up == down && (low & 1) != 0);
    return sign | (takeHigh ? high : low);
  }
};

constexpr Half kFloat16{10, 15};
constexpr Half kBFloat16{7, 127};

template <class T>
T extreme(T a, T b, bool wantMax) {
  if (std::isnan(a)) return a;
  if (std::isnan(b)) return b;
  if (a == b) return std::signbit(a) != wantMax ? a : b;  // -0 < +0
  return (a < b) != wantMax ? a : b;
}

/// Recursive: the left part's length is the largest power of two below the whole length.
template <class T, class Combine>
T fold(const std::vector<T>& s, std::size_t from, std::size_t count, const Combine& combine) {
  if (count == 1) return s[from];
  std::size_t left = 1;
  while (2 * left < count) left *= 2;
  const T a = fold(s, from, left, combine);
  const T b = fold(s, from + left, count - left, combine);
  return combine(a, b);
}

template <class T>
T floatElement(ReduceOp op, std::vector<T> s, double factor, double divisor) {
  for (T& v : s) {
    if (op == ReduceOp::PreMulSum) v = v * static_cast<T>(factor);
  }
  volatile T acc = fold(s, 0, s.size(), [op](T a, T b) -> T {
    if (op == ReduceOp::Min || op == ReduceOp::Max) return extreme<T>(a, b, op == ReduceOp::Max);
    volatile T result = op == ReduceOp::Product ? a * b : a + b;  // volatile: no contraction
    return result;
  });
  if (op == ReduceOp::Avg) acc = acc / static_cast<T>(divisor);
  if (std::isnan(acc)) return fromBits<T>(sizeof(T) == 4 ? 0x7fc00000u : 0x7ff8000000000000u);
  return acc;
}

template <class T>
void complexElement(ReduceOp op, const std::vector<T>& re, const std::vector<T>& im, double factor,
                    double divisor, T* out) {
  struct Number {
    T re, im;
  };
  std::vector<Number> s;
  for (std::size_t j = 0; j < re.size(); ++j) s.push_back({re[j], im[j]});
  const Number product = fold(s, 0, s.size(), [](const Number& a, const Number& b) -> Number {
    volatile T ac = a.re * b.re, bd = a.im * b.im, ad = a.re * b.im, bc = a.im * b.re;
    volatile T real = ac - bd, imaginary = ad + bc;
    return {real, imaginary};
  });
  const bool isProduct = op == ReduceOp::Product;
  out[0] = floatElement(op, isProduct ? std::vector<T>{product.re} : re, factor, divisor);
  out[1] = floatElement(op, isProduct ? std::vector<T>{product.im} : im, factor, divisor);
}

/// Computes modulo 2^64, then truncates to T.
template <class T>
T integerElement(ReduceOp op, const std::vector<T>& s, double divisor) {
  auto acc = static_cast<std::uint64_t>(s[0]);
  for (std::size_t j = 1; j < s.size(); ++j) {
    const auto v = static_cast<std::uint64_t>(s[j]);
    switch (op) {
      case ReduceOp::Sum:
      case ReduceOp::Avg:
        acc += v;
        break;
      case ReduceOp::Product:
        acc *= v;
        break;
      case ReduceOp::BitAnd:
        acc &= v;
        break;
      case ReduceOp::BitOr:
        acc |= v;
        break;
      case ReduceOp::BitXor:
        acc ^= v;
        break;
      case ReduceOp::Min:
        acc = s[j] < static_cast<T>(acc) ? v : acc;
        break;
      default:
        acc = s[j] > static_cast<T>(acc) ? v : acc;
        break;
    }
  }
  if (op == ReduceOp::Avg) {  // rounds towards zero, for every width of T
    using Wide = std::conditional_t<std::is_signed_v<T>, __int128, unsigned __int128>;
    return static_cast<T>(static_cast<Wide>(static_cast<T>(acc)) / static_cast<Wide>(divisor));
  }
  return static_cast<T>(acc);
}

inline std::uint8_t boolElement(ReduceOp op, const std::vector<std::uint8_t>& s) {
  unsigned trues = 0;
  for (const std::uint8_t v : s) trues += v != 0 ? 1 : 0;
  switch (op) {
    case ReduceOp::BitXor:
      return trues % 2;
    case ReduceOp::Product:
    case ReduceOp::Min:
    case ReduceOp::BitAnd:
      return trues == s.size();
    default:
      return trues != 0;
  }
}

/// Lane `index` of every source.
template <class T>
std::vector<T> gather(const char* const* srcs, int k, std::size_t index) {
  std::vector<T> s(static_cast<std::size_t>(k));
  for (int j = 0; j < k; ++j) std::memcpy(&s[j], srcs[j] + index * sizeof(T), sizeof(T));
  return s;
}

/// Writes element i of the reduction to dst.
inline void element(DType dtype, ReduceOp op, const char* const* srcs, int k, std::size_t i,
                    double factor, double divisor, char* dst) {
  const std::size_t size = fastcoll::elementSize(dtype);
  const auto put = [&](auto value) { std::memcpy(dst + i * size, &value, size); };
  const auto integer = [&](auto zero) {
    put(integerElement(op, gather<decltype(zero)>(srcs, k, i), divisor));
  };
  const auto real = [&](auto zero) {
    put(floatElement(op, gather<decltype(zero)>(srcs, k, i), factor, divisor));
  };
  const auto half = [&](const Half& format) {
    std::vector<float> s;
    for (const std::uint16_t h : gather<std::uint16_t>(srcs, k, i))
      s.push_back(static_cast<float>(format.decode(h)));
    put(static_cast<std::uint16_t>(format.encode(floatElement(op, s, factor, divisor))));
  };
  const auto pair = [&](auto zero) {
    using T = decltype(zero);
    T out[2];
    complexElement(op, gather<T>(srcs, k, 2 * i), gather<T>(srcs, k, 2 * i + 1), factor, divisor,
                   out);
    std::memcpy(dst + i * size, out, size);
  };

  const bool scales = op == ReduceOp::Avg || op == ReduceOp::PreMulSum;
  if (k == 1 && !scales && dtype != DType::Bool) {
    std::memcpy(dst + i * size, srcs[0] + i * size, size);
    return;
  }
  switch (dtype) {
    case DType::UInt8:
      return integer(std::uint8_t{});
    case DType::Int8:
      return integer(std::int8_t{});
    case DType::UInt16:
      return integer(std::uint16_t{});
    case DType::Int16:
      return integer(std::int16_t{});
    case DType::UInt32:
      return integer(std::uint32_t{});
    case DType::Int32:
      return integer(std::int32_t{});
    case DType::UInt64:
      return integer(std::uint64_t{});
    case DType::Int64:
      return integer(std::int64_t{});
    case DType::Bool:
      return put(boolElement(op, gather<std::uint8_t>(srcs, k, i)));
    case DType::Float16:
      return half(kFloat16);
    case DType::BFloat16:
      return half(kBFloat16);
    case DType::Float32:
      return real(float{});
    case DType::Float64:
      return real(double{});
    case DType::Complex64:
      return pair(float{});
    case DType::Complex128:
      return pair(double{});
    default:
      return;
  }
}

}  // namespace oracle
