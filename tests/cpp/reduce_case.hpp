// One reduction with its inputs and expected result, and the ways to run it: separate and
// misaligned, in place, in pieces, and into two places.
#pragma once

#include <algorithm>
#include <cstdio>
#include <random>
#include <string>

#include "base/error.hpp"
#include "reduce/reduce.hpp"
#include "reduce_oracle.hpp"

using fastcoll::DType;
using fastcoll::ReduceArgs;
using fastcoll::ReduceOp;

inline long checks = 0, failures = 0;

#define CHECK(condition, ...)                                        \
  do {                                                               \
    ++checks;                                                        \
    if (!(condition) && ++failures <= 20)                            \
      std::printf("%s:%d: %s: %s\n", __FILE__, __LINE__, #condition, \
                  fastcoll::concat(__VA_ARGS__).c_str());            \
  } while (false)

inline std::mt19937_64 random64(20240607);

/// Both signs of zero, the smallest, middle and largest subnormal, the smallest and largest normal,
/// infinity, a signaling and two quiet NaN.
inline std::vector<std::uint64_t> cornersOf(int fraction, int width) {
  const std::uint64_t one = 1, sign = one << (width - 1);
  const std::uint64_t infinity = (sign - 1) >> fraction << fraction;
  std::vector<std::uint64_t> corners;
  for (const std::uint64_t m :
       {one * 0, one, one << (fraction - 1), (one << fraction) - 1, one << fraction, infinity - 1,
        infinity, infinity + 1, infinity + (one << (fraction - 1)), sign - 1})
    corners.push_back(m), corners.push_back(m | sign);
  return corners;
}

/// A quarter random bits, an eighth corners, else numbers between -2 and 2.
template <class T, class Encode>
void fillFloats(char* to, std::size_t bytes, int fraction, Encode encode) {
  const auto corners = cornersOf(fraction, 8 * sizeof(T));
  for (std::size_t i = 0; i + sizeof(T) <= bytes; i += sizeof(T)) {
    const std::uint64_t bits = random64(), kind = random64() % 8;
    const T value = kind < 2 ? oracle::fromBits<T>(bits)
                    : kind == 2
                        ? oracle::fromBits<T>(corners[bits % corners.size()])
                        : encode(static_cast<double>(static_cast<std::int64_t>(bits)) * 0x1p-62);
    std::memcpy(to + i, &value, sizeof value);
  }
}

inline void fill(DType t, char* to, std::size_t bytes) {
  const auto half = [](const oracle::Half& h) {
    return [h](double v) { return static_cast<std::uint16_t>(h.encode(static_cast<float>(v))); };
  };
  switch (t) {
    case DType::Float16:
      return fillFloats<std::uint16_t>(to, bytes, 10, half(oracle::kFloat16));
    case DType::BFloat16:
      return fillFloats<std::uint16_t>(to, bytes, 7, half(oracle::kBFloat16));
    case DType::Float32:
    case DType::Complex64:
      return fillFloats<float>(to, bytes, 23, [](double v) { return static_cast<float>(v); });
    case DType::Float64:
    case DType::Complex128:
      return fillFloats<double>(to, bytes, 52, [](double v) { return v; });
    default:
      for (std::size_t i = 0; i < bytes; ++i) {
        to[i] = static_cast<char>(random64());
        if (t == DType::Bool && random64() % 4 != 0) to[i] &= 1;
      }
  }
}

struct Case {
  static constexpr std::size_t kMost = 4099;

  DType dtype;
  ReduceOp op;
  int k;
  double factor, divisor;
  std::size_t size;
  std::vector<std::vector<char>> sources;
  std::vector<char> expected;

  Case(DType dtype, ReduceOp op, int k, double factor, double divisor)
      : dtype(dtype), op(op), k(k), factor(factor), divisor(divisor), size(elementSize(dtype)) {
    for (int j = 0; j < k; ++j) {
      sources.emplace_back(kMost * size);
      fill(dtype, sources.back().data(), kMost * size);
    }
    expected.resize(kMost * size);
    const auto srcs = pointers(0);
    for (std::size_t i = 0; i < kMost; ++i)
      oracle::element(dtype, op, srcs.data(), k, i, factor, divisor, expected.data());
  }

  std::vector<const char*> pointers(std::size_t at) const {
    std::vector<const char*> srcs;
    for (const auto& source : sources) srcs.push_back(source.data() + at * size);
    return srcs;
  }

  std::string name() const {
    return fastcoll::concat(fastcoll::reduceIsa(), " ", dtypeName(dtype), " ", reduceOpName(op),
                            " k=", k, " divisor=", divisor, " factor=", factor);
  }

  void run(char* dst, const std::vector<const char*>& srcs, std::size_t count,
           char* copy = nullptr) const {
    const std::vector<const void*> sources(srcs.begin(), srcs.end());
    reduceFunction(dtype, op)({dst, sources.data(), k, count, factor, divisor, copy});
  }

  void compare(const char* got, std::size_t count, const std::string& where) const {
    const auto end = expected.begin() + static_cast<std::ptrdiff_t>(count * size);
    const auto bad = std::mismatch(expected.begin(), end, got).first;
    CHECK(bad == end, name(), " ", where, " count=", count,
          " element=", static_cast<std::size_t>(bad - expected.begin()) / size);
  }

  /// Source j begins `offset` + j % 7 bytes (0 for offset 0) after the start of its allocation. It
  /// ends with the allocation, so the sanitizer detects a read past the end.
  void checkApart(std::size_t count, std::size_t offset) const {
    std::vector<std::vector<char>> copies;
    std::vector<const char*> srcs;
    for (int j = 0; j < k; ++j) {
      const std::size_t shift = offset == 0 ? 0 : offset + static_cast<std::size_t>(j) % 7;
      copies.emplace_back(shift + count * size);
      std::copy_n(sources[j].begin(), count * size, copies.back().begin() + shift);
      srcs.push_back(copies.back().data() + shift);
    }
    std::vector<char> dst(offset + count * size + 1, '\x5a');
    run(dst.data() + offset, srcs, count);
    compare(dst.data() + offset, count, fastcoll::concat("offset=", offset));
    CHECK(dst.back() == '\x5a', name(), " wrote past the end");

    std::vector<char> copy(2 * offset + count * size + 1, '\x5a');
    std::fill(dst.begin(), dst.end(), '\x5a');
    run(dst.data() + offset, srcs, count, copy.data() + 2 * offset);
    compare(dst.data() + offset, count, fastcoll::concat("beside a copy, offset=", offset));
    compare(copy.data() + 2 * offset, count, fastcoll::concat("the copy, offset=", 2 * offset));
    CHECK(dst.back() == '\x5a' && copy.back() == '\x5a', name(), " wrote past the end");
  }

  void checkInPlace(int j) const {
    std::vector<char> dst = sources[j];
    auto srcs = pointers(0);
    srcs[j] = dst.data();
    run(dst.data(), srcs, kMost);
    compare(dst.data(), kMost, fastcoll::concat("in place on ", j));

    // Like ranks that write the result into each other's tensors.
    dst = sources[j];
    std::vector<char> copy = sources[(j + 1) % k];
    if (k > 1) srcs[(j + 1) % k] = copy.data();
    run(dst.data(), srcs, kMost, copy.data());
    compare(dst.data(), kMost, fastcoll::concat("in place on two from ", j));
    compare(copy.data(), kMost, fastcoll::concat("the second of two in place from ", j));
  }

  void checkInPieces() const {
    std::vector<char> dst(kMost * size);
    for (std::size_t at = 0, piece; at < kMost; at += piece) {
      piece = std::min<std::size_t>(1 + random64() % 97, kMost - at);
      run(dst.data() + at * size, pointers(at), piece);
    }
    compare(dst.data(), kMost, "in pieces");
  }
};
