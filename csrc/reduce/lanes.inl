// The vectors of the kernels: GCC's and Clang's vector types. So one text serves SSE2, AVX2,
// AVX-512 and NEON, and floating-point operations keep the order in which they are written.

constexpr int kWidth = FASTCOLL_VECTOR_BYTES;
#if defined(__x86_64__)
constexpr bool kIsX86 = true;
#else
constexpr bool kIsX86 = false;
#endif

template <class T, int kBytes = kWidth>
struct VectorOf {
  typedef T type __attribute__((vector_size(kBytes)));
};
template <class T>
using Vec = typename VectorOf<T>::type;

/// The unsigned type as wide as T; for floats also the sign bit, exponent mask and canonical NaN.
template <class T>
struct Lanes {
  using Bits = std::make_unsigned_t<T>;
};
template <>
struct Lanes<float> {
  using Bits = std::uint32_t;
  static constexpr Bits kSign = 0x80000000u, kNan = 0x7fc00000u, kExponent = 0x7f800000u;
};
template <>
struct Lanes<double> {
  using Bits = std::uint64_t;
  static constexpr Bits kSign = 0x8000000000000000u, kNan = 0x7ff8000000000000u,
                        kExponent = 0x7ff0000000000000u;
};

template <class T>
FASTCOLL_INLINE Vec<T> broadcast(T value) {
  static_assert(T(1) / T(2) == T(0), "of a float this would turn -0 into +0");
  return Vec<T>{} + value;
}

/// The same bits as a vector of T.
template <class T, class V>
FASTCOLL_INLINE Vec<T> as(V v) {
  static_assert(sizeof(V) == kWidth, "a vector is seen as another of its own width");
  return (Vec<T>)v;
}

template <class T>
FASTCOLL_INLINE Vec<T> flipBits(Vec<T> v, typename Lanes<T>::Bits bits) {
  return as<T>(as<typename Lanes<T>::Bits>(v) ^ bits);
}

/// The NaN of an addition (payload, sign) depends on the CPU and on the compiler's order of the
/// operands. Every NaN becomes this one, so the bits of a result do not depend on them.
template <class T>
FASTCOLL_INLINE Vec<T> canonicalNan(Vec<T> v) {
  using Bits = typename Lanes<T>::Bits;
  return v != v ? as<T>(broadcast<Bits>(Lanes<T>::kNan)) : v;
}

/// Which lanes to take from (re, im) pairs: re twice, im twice, or the two exchanged.
enum class Pick { Re, Im, Swapped };

constexpr std::size_t pickedLane(Pick pick, std::size_t lane) {
  return pick == Pick::Swapped ? lane ^ 1u : lane / 2 * 2 + (pick == Pick::Im ? 1u : 0u);
}

template <class T, Pick kPick, std::size_t... kLane>
FASTCOLL_INLINE Vec<T> pickFromPairs(Vec<T> v, std::index_sequence<kLane...>) {
#if defined(__clang__)
  return __builtin_shufflevector(v, v, pickedLane(kPick, kLane)...);
#else
  return __builtin_shuffle(v, Vec<typename Lanes<T>::Bits>{pickedLane(kPick, kLane)...});
#endif
}

template <Pick kPick, class T>
FASTCOLL_INLINE Vec<T> pickFromPairs(Vec<T> v) {
  return pickFromPairs<T, kPick>(v, std::make_index_sequence<kWidth / sizeof(T)>{});
}
