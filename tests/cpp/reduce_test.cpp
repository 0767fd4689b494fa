// csrc/reduce against a slow oracle, bit for bit: every type, operation and instruction set.
// tests/cpp/sanitize.sh builds and runs it. --few leaves out sums of more than 17 inputs.
#include <utility>

#include "reduce_case.hpp"

namespace {

const ReduceOp kOps[] = {ReduceOp::Sum,   ReduceOp::Avg,    ReduceOp::Product,
                         ReduceOp::Min,   ReduceOp::Max,    ReduceOp::BitAnd,
                         ReduceOp::BitOr, ReduceOp::BitXor, ReduceOp::PreMulSum};

std::vector<std::string> availableIsas() {
  std::vector<std::string> names;
  for (const char* name : {"baseline", "avx2", "avx512"}) {
    try {
      fastcoll::setReduceIsa(name);
      names.push_back(name);
    } catch (const fastcoll::Error& error) {
      CHECK(error.kind() == fastcoll::ErrorKind::Value, name);
      std::printf("skipped: %s\n", error.what());
    }
  }
  return names;
}

bool isDefined(DType t, ReduceOp op) {
  switch (op) {
    case ReduceOp::Sum:
    case ReduceOp::Product:
      return t <= DType::Complex128;
    case ReduceOp::Min:
    case ReduceOp::Max:
      return t <= DType::Float64;
    case ReduceOp::Avg:
      return t <= DType::Complex128 && t != DType::Bool;
    case ReduceOp::PreMulSum:
      return t >= DType::Float16 && t <= DType::Complex128;
    case ReduceOp::BitAnd:
    case ReduceOp::BitOr:
    case ReduceOp::BitXor:
      return t <= DType::Bool;
    default:
      return false;
  }
}

void testValues(const std::vector<std::string>& isas, int mostInputs) {
  for (int t = 0; t <= static_cast<int>(DType::Complex128); ++t) {
    for (const ReduceOp op : kOps) {
      const DType dtype = static_cast<DType>(t);
      if (!isDefined(dtype, op)) continue;
      for (const int k : {1, 2, 3, 4, 5, 6, 7, 8, 13, 17, 64, 67}) {
        if (k > mostInputs) break;
        std::vector<std::pair<double, double>> scalars = {{1.0, 1.0}};  // factor, divisor
        const bool integers = dtype < DType::Bool;
        if (op == ReduceOp::Avg) scalars = {{1, k}, {1, 8}, {1, 3}, {1, 200}};
        if (op == ReduceOp::Avg && !integers) scalars.insert(scalars.end(), {{1, -0.25}, {1, 0}});
        if (op == ReduceOp::PreMulSum) scalars = {{0.125, 1}, {1.0 / 3, 1}, {-0.0, 1}};
        if (op == ReduceOp::Avg && k == 2 && !integers)
          for (const double d : {0x1p-127, 0x1p127, 0x1p126, -0x1p-1022, 0x1p1023, 0x1p1022})
            scalars.push_back({1, d});
        for (const auto& [factor, divisor] : scalars) {
          const Case c(dtype, op, k, factor, divisor);
          for (const std::string& isa : isas) {
            fastcoll::setReduceIsa(isa.c_str());
            for (const std::size_t count : {0, 1, 7, 31, 32, 33, 1000, 4099})
              for (const std::size_t offset : {0, 1, 6, 33}) c.checkApart(count, offset);
            for (int j = 0; j < k; ++j) c.checkInPlace(j);
            c.checkInPieces();
          }
        }
      }
    }
  }
}

/// Every 16-bit float, times factors that cover all roundings, subnormal results and overflows.
void testAllHalves(const std::vector<std::string>& isas) {
  constexpr std::size_t kAll = 65536;
  std::vector<std::uint16_t> all(kAll), got(kAll), expected(kAll);
  for (std::size_t i = 0; i < kAll; ++i) all[i] = static_cast<std::uint16_t>(i);
  const char* bytes = reinterpret_cast<const char*>(all.data());
  const void* srcs[] = {all.data()};
  for (const DType dtype : {DType::Float16, DType::BFloat16}) {
    for (const double factor :
         {1.0, 0.5, 0x1p-9, 0x1p-12, 0x1.8p-11, 0x1.555556p-3, 1.25, 0x1.fp3, 0x1p-126}) {
      for (std::size_t i = 0; i < kAll; ++i)
        oracle::element(dtype, ReduceOp::PreMulSum, &bytes, 1, i, factor, 1,
                        reinterpret_cast<char*>(expected.data()));
      for (const std::string& isa : isas) {
        fastcoll::setReduceIsa(isa.c_str());
        reduceFunction(dtype, ReduceOp::PreMulSum)({got.data(), srcs, 1, kAll, factor, 1.0});
        CHECK(got == expected, isa, " ", dtypeName(dtype), " times ", factor);
      }
    }
  }
}

/// Widens every 16-bit float. Narrows float32 numbers: every exponent with fractions around each
/// rounding, and random bits.
void testCasts(const std::vector<std::string>& isas) {
  constexpr std::size_t kAll = 65536;
  std::vector<std::uint16_t> all(kAll);
  for (std::size_t i = 0; i < kAll; ++i) all[i] = static_cast<std::uint16_t>(i);
  std::vector<float> floats;
  for (std::uint64_t high = 0; high < 1u << 12; ++high)  // sign, exponent, three bits of fraction
    for (const std::uint64_t low : {0x0ull, 0x1ull, 0xfffull, 0x1000ull, 0x1001ull, 0x3000ull,
                                    0x7fffull, 0x8000ull, 0x8001ull, 0x18000ull, 0xfffffull})
      floats.push_back(oracle::fromBits<float>(high << 20 | low));
  for (int i = 0; i < 100000; ++i) floats.push_back(oracle::fromBits<float>(random64()));
  for (const auto& [wire, format] :
       {std::pair(DType::Float16, oracle::kFloat16), std::pair(DType::BFloat16, oracle::kBFloat16)})
    for (const std::string& isa : isas) {
      fastcoll::setReduceIsa(isa.c_str());
      const fastcoll::WireCast& cast = fastcoll::wireCast(wire);
      std::vector<float> wide(kAll);
      cast.widen(wide.data(), all.data(), kAll);
      for (std::size_t i = 0; i < kAll; ++i) {
        const double expected = format.decode(static_cast<std::uint32_t>(i));
        CHECK(std::isnan(expected)
                  ? std::isnan(wide[i])
                  : wide[i] == expected && std::signbit(wide[i]) == std::signbit(expected),
              isa, " ", dtypeName(wire), " ", i);
      }
      for (const std::size_t count :
           {floats.size(), std::size_t{0}, std::size_t{1}, std::size_t{31}, std::size_t{33}}) {
        for (const std::size_t offset : {0, 1, 3}) {  // bytes, of neither buffer's element
          std::vector<char> in(4 * count + offset + 1), out(2 * count + offset + 2, 0x55);
          std::memcpy(in.data() + offset, floats.data(), 4 * count);
          cast.narrow(out.data() + offset, in.data() + offset, count);
          for (std::size_t i = 0; i < count; ++i) {
            std::uint16_t half;
            std::memcpy(&half, out.data() + offset + 2 * i, sizeof half);
            CHECK(half == format.encode(floats[i]), isa, " ", dtypeName(wire), " ", floats[i]);
          }
          CHECK(out[out.size() - 1] == 0x55 && out[out.size() - 2] == 0x55, isa, " went beyond");
        }
      }
    }
}

/// Numbers whose squares sum exactly in any order. If a number is not finite, neither is the sum.
void testSquares(const std::vector<std::string>& isas) {
  for (const std::string& isa : isas) {
    fastcoll::setReduceIsa(isa.c_str());
    for (const std::size_t count : {0, 1, 7, 64, 1025, 5000}) {
      std::vector<float> floats(count);
      std::vector<double> doubles(count);
      std::vector<std::uint16_t> halves(count), brains(count);
      double expected = 0;
      for (std::size_t i = 0; i < count; ++i) {
        floats[i] = static_cast<float>(i % 17) - 8;
        doubles[i] = floats[i];
        halves[i] = static_cast<std::uint16_t>(oracle::kFloat16.encode(floats[i]));
        brains[i] = static_cast<std::uint16_t>(oracle::kBFloat16.encode(floats[i]));
        expected += doubles[i] * doubles[i];
      }
      const auto check = [&](DType dtype, const void* data, std::size_t numbers) {
        const double found = fastcoll::squaresFunction(dtype)(data, numbers);
        CHECK(found == expected, isa, " ", dtypeName(dtype), " ", count, ": ", found);
      };
      check(DType::Float32, floats.data(), count);
      check(DType::Complex64, floats.data(), count);
      check(DType::Float64, doubles.data(), count);
      check(DType::Float16, halves.data(), count);
      check(DType::BFloat16, brains.data(), count);
      for (const float odd : {HUGE_VALF, -HUGE_VALF, std::nanf("")})
        for (std::size_t i = 0; i < count; i += 61) {
          const float kept = std::exchange(floats[i], odd);
          CHECK(!std::isfinite(fastcoll::squaresFunction(DType::Float32)(floats.data(), count)),
                isa, " ", odd, " at ", i);
          floats[i] = kept;
        }
      if (count > 0) {
        floats[0] = 0x1p127f;  // its square overflows float32
        CHECK(std::isfinite(fastcoll::squaresFunction(DType::Float32)(floats.data(), count)), isa);
      }
    }
    for (const DType dtype : {DType::Int32, DType::Bool, DType::Float8E5M2}) {
      bool refused = false;
      try {
        fastcoll::squaresFunction(dtype);
      } catch (const fastcoll::Error& error) {
        refused = error.kind() == fastcoll::ErrorKind::Type;
      }
      CHECK(refused, isa, " sums squares of ", dtypeName(dtype));
    }
  }
}

void testErrors(const std::vector<std::string>& isas) {
  for (const std::string& isa : isas) {
    fastcoll::setReduceIsa(isa.c_str());
    CHECK(fastcoll::reduceIsa() == isa, isa);
    for (int t = 0; t <= static_cast<int>(DType::Opaque); ++t) {
      for (int o = 0; o <= static_cast<int>(ReduceOp::None); ++o) {
        const DType dtype = static_cast<DType>(t);
        const ReduceOp op = static_cast<ReduceOp>(o);
        std::string text;
        bool isValue = false;
        try {
          reduceFunction(dtype, op);
        } catch (const fastcoll::Error& error) {
          text = error.what();
          isValue = error.kind() == fastcoll::ErrorKind::Value;
        }
        const std::string what =
            fastcoll::concat(dtypeName(dtype), " ", reduceOpName(op), " says: ", text);
        CHECK(isDefined(dtype, op) == text.empty(), what);
        if (text.empty()) continue;
        CHECK(isValue && text.find(dtypeName(dtype)) != std::string::npos, what);
        CHECK(text.find(';') != std::string::npos, what, " (no remedy)");
      }
    }
  }
  try {
    fastcoll::setReduceIsa("sse9");
    CHECK(false, "sse9 was accepted");
  } catch (const fastcoll::Error& error) {
    CHECK(error.kind() == fastcoll::ErrorKind::Value, error.what());
  }
}

}  // namespace

int main(int argc, char** argv) {
  const bool few = argc == 2 && std::string(argv[1]) == "--few";
  const auto isas = availableIsas();
  testErrors(isas);
  testAllHalves(isas);
  testCasts(isas);
  testSquares(isas);
  testValues(isas, few ? 17 : 67);
  std::printf("%ld checks, %ld failures\n", checks, failures);
  return failures == 0 ? 0 : 1;
}
