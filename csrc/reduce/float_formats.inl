// How floats in memory become lanes for arithmetic, and how lanes are written back.
//
// A 16-bit float is widened to float32 when it is read, which is exact. It is rounded once, to
// nearest even, when it is written. Subnormal numbers are kept unless the caller's thread has set
// the CPU to flush them (torch.set_flush_denormal); those of float16 are kept even then.

template <class T>
struct Native {
  using Lane = T;
  using Raw = Vec<T>;
  using Acc = Vec<T>;
  static constexpr std::size_t kElement = sizeof(T);
  static FASTCOLL_INLINE Acc unpack(Raw raw) { return raw; }
  static FASTCOLL_INLINE Raw pack(Acc acc) { return canonicalNan<T>(acc); }
};

/// Two 16-bit elements share a 32-bit lane of memory. Shifts separate them, which need no shuffles
/// and keep the order in memory.
struct Pair {
  Vec<float> low, high;
};
using Words = Vec<std::uint32_t>;

/// As many 16-bit elements as a vector has float32 lanes, for the wire casts.
using Half = VectorOf<std::uint16_t, kWidth / 2>::type;

struct BFloat16 {
  using Lane = float;
  using Raw = Words;
  using Acc = Pair;
  static constexpr std::size_t kElement = 2;

  static FASTCOLL_INLINE Acc unpack(Raw raw) {
    return {as<float>(raw << 16), as<float>(raw & 0xffff0000u)};
  }
  static FASTCOLL_INLINE Raw pack(Acc acc) {
    return (round(acc.low) >> 16) | (round(acc.high) & 0xffff0000u);
  }
  static FASTCOLL_INLINE Half narrow(Vec<float> v) {
    return __builtin_convertvector(round(v) >> 16, Half);
  }
  static FASTCOLL_INLINE Vec<float> widen(Half half) {
    return as<float>(__builtin_convertvector(half, Words) << 16);
  }

 private:
  /// The upper half of the result is the bfloat16. The carry out of the lower half rounds up, even
  /// into the exponent and to Inf. A NaN must not get this carry.
  static FASTCOLL_INLINE Words round(Vec<float> v) {
    const Words bits = as<std::uint32_t>(v);
    const Words rounded = bits + 0x7fffu + ((bits >> 16) & 1u);
    return v != v ? broadcast<std::uint32_t>(Lanes<float>::kNan) : rounded;
  }
};

#if defined(__aarch64__) || (defined(__x86_64__) && FASTCOLL_VECTOR_BYTES > 16)

/// By the processor's instructions: NEON, or F16C, whose instruction gives the rounding mode.
struct Float16 {
  using Lane = float;
  using Raw = Half;
  using Acc = Vec<float>;
  static constexpr std::size_t kElement = 2;

#if defined(__aarch64__)
  static FASTCOLL_INLINE Acc unpack(Raw raw) { return (Acc)vcvt_f32_f16((float16x4_t)raw); }
  static FASTCOLL_INLINE Raw pack(Acc acc) {
    return (Raw)vcvt_f16_f32((float32x4_t)canonicalNan<float>(acc));
  }
#elif FASTCOLL_VECTOR_BYTES == 64
  // With a mask of ones, because GCC 12 warns that plain intrinsics read an undefined register.
  static FASTCOLL_INLINE Acc unpack(Raw raw) {
    return (Acc)_mm512_maskz_cvtph_ps(0xffff, (__m256i)raw);
  }
  static FASTCOLL_INLINE Raw pack(Acc acc) {
    return (Raw)_mm512_maskz_cvtps_ph(0xffff, (__m512)canonicalNan<float>(acc),
                                      _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
  }
#else
  static FASTCOLL_INLINE Acc unpack(Raw raw) { return (Acc)_mm256_cvtph_ps((__m128i)raw); }
  static FASTCOLL_INLINE Raw pack(Acc acc) {
    return (Raw)_mm256_cvtps_ph((__m256)canonicalNan<float>(acc), _MM_FROUND_TO_NEAREST_INT);
  }
#endif
  static FASTCOLL_INLINE Half narrow(Vec<float> v) { return pack(v); }
  static FASTCOLL_INLINE Vec<float> widen(Half half) { return unpack(half); }
};

#else

/// By integer arithmetic. An addition changes the exponent field e from bias 15 to bias 127.
/// Subnormals (e = 0) are normal float32 numbers; a float addition aligns them in both directions.
struct Float16 {
  using Lane = float;
  using Raw = Words;
  using Acc = Pair;
  static constexpr std::size_t kElement = 2;

  static FASTCOLL_INLINE Acc unpack(Raw raw) { return {expand(raw & 0xffffu), expand(raw >> 16)}; }
  static FASTCOLL_INLINE Raw pack(Acc acc) { return round(acc.low) | (round(acc.high) << 16); }
  static FASTCOLL_INLINE Half narrow(Vec<float> v) {
    return __builtin_convertvector(round(v), Half);
  }
  static FASTCOLL_INLINE Vec<float> widen(Half half) {
    return expand(__builtin_convertvector(half, Words));
  }

 private:
  static constexpr std::uint32_t kRebias = (127u - 15u) << 23;

  static FASTCOLL_INLINE Vec<float> expand(Words half) {
    const Words magnitude = (half & 0x7fffu) << 13;
    const Words exponent = magnitude & (0x1fu << 23);
    const Words normal = magnitude + kRebias;
    // 2^-14 * (1 + f) - 2^-14 is 2^-14 * f, exactly.
    const Words base = broadcast<std::uint32_t>(kRebias + (1u << 23));
    const Words subnormal = as<std::uint32_t>(as<float>(magnitude + base) - as<float>(base));
    const Words finite = exponent == 0u ? subnormal : normal;
    const Words bits = exponent == (0x1fu << 23) ? normal + kRebias : finite;
    return as<float>(bits | ((half & 0x8000u) << 16));
  }

  static FASTCOLL_INLINE Words round(Vec<float> v) {
    const Words bits = as<std::uint32_t>(v);
    const Words magnitude = bits & 0x7fffffffu;
    // The carry out of the 13 dropped bits rounds up, to Inf from 65520 on.
    const Words normal = (magnitude - kRebias + 0xfffu + ((magnitude >> 13) & 1u)) >> 13;
    // Near 1/2 the last bit of a float32 is 2^-24, like that of a subnormal float16.
    const Words half = broadcast<std::uint32_t>(126u << 23);
    const Words subnormal = as<std::uint32_t>(as<float>(magnitude) + as<float>(half)) - half;
    const Words finite = magnitude < ((127u - 14u) << 23) ? subnormal : normal;
    const Words result =
        magnitude >= ((127u + 16u) << 23) ? broadcast<std::uint32_t>(0x7c00u) : finite;
    const Words number = result | ((bits >> 16) & 0x8000u);
    return v != v ? broadcast<std::uint32_t>(0x7e00u) : number;
  }
};

#endif
