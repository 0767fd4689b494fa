// The operations on floats and complex numbers, on lanes that a format has unpacked.
//
// Each step is rounded as written: no contraction into a fused multiply-add, no reassociation.

/// An operation: post(combine(combine(pre(s0), pre(s1)), ...)), each step on a vector of lanes.
template <class T>
struct Operation {
  static constexpr bool kCopiesOne = true;  // the result of one source is that source
  static constexpr bool kLongTiles = false;
  explicit Operation(const ReduceArgs&) noexcept {}
  FASTCOLL_INLINE Vec<T> pre(Vec<T> v) const { return v; }
  FASTCOLL_INLINE Vec<T> post(Vec<T> v) const { return v; }
};

template <class T>
struct Sum : Operation<T> {
  static constexpr bool kLongTiles = true;  // the operation of gradients
  using Operation<T>::Operation;
  FASTCOLL_INLINE Vec<T> combine(Vec<T> a, Vec<T> b) const { return a + b; }
};

template <class T>
struct SumThenDivide : Sum<T> {
  static constexpr bool kCopiesOne = false;
  explicit SumThenDivide(const ReduceArgs& args) noexcept
      : Sum<T>(args), divisor(T(args.divisor)) {}
  FASTCOLL_INLINE Vec<T> post(Vec<T> v) const { return v / divisor; }
  T divisor;
};

/// For a divisor with an exact reciprocal: the same bits as a division, several times as fast.
template <class T>
struct SumThenScale : Sum<T> {
  static constexpr bool kCopiesOne = false;
  explicit SumThenScale(const ReduceArgs& args) noexcept
      : Sum<T>(args), scale(T(1) / T(args.divisor)) {}
  FASTCOLL_INLINE Vec<T> post(Vec<T> v) const { return v * scale; }
  T scale;
};

/// True for powers of two of either sign, if they and their reciprocals are normal numbers.
template <class T>
bool hasExactReciprocal(T divisor) noexcept {
  using Bits = typename Lanes<T>::Bits;
  Bits bits;
  __builtin_memcpy(&bits, &divisor, sizeof bits);
  constexpr Bits kLowest = (Lanes<T>::kExponent & (~Lanes<T>::kExponent + 1));  // exponent field 1
  const Bits magnitude = bits & ~Lanes<T>::kSign;
  return (magnitude & ~Lanes<T>::kExponent) == 0 && magnitude >= kLowest &&
         magnitude < Lanes<T>::kExponent - kLowest;
}

template <class T>
struct PreMulSum : Sum<T> {
  static constexpr bool kLongTiles = false;
  static constexpr bool kCopiesOne = false;
  explicit PreMulSum(const ReduceArgs& args) noexcept : Sum<T>(args), factor(T(args.factor)) {}
  FASTCOLL_INLINE Vec<T> pre(Vec<T> v) const { return v * factor; }
  T factor;
};

template <class T>
struct Product : Operation<T> {
  using Operation<T>::Operation;
  FASTCOLL_INLINE Vec<T> combine(Vec<T> a, Vec<T> b) const { return a * b; }
};

/// (a + bi)(c + di) = (ac - bd) + (ad + bc)i
template <class T>
struct ComplexProduct : Operation<T> {
  using Operation<T>::Operation;
  FASTCOLL_INLINE Vec<T> combine(Vec<T> a, Vec<T> b) const {
    const Vec<T> direct = pickFromPairs<Pick::Re, T>(a) * b;
    const Vec<T> crossed = pickFromPairs<Pick::Im, T>(a) * pickFromPairs<Pick::Swapped, T>(b);
    return direct + negateRe(crossed);
  }

 private:
  static FASTCOLL_INLINE Vec<T> negateRe(Vec<T> v) {
    return negateRe(v, std::make_index_sequence<kWidth / sizeof(T)>{});
  }
  template <std::size_t... kLane>
  static FASTCOLL_INLINE Vec<T> negateRe(Vec<T> v, std::index_sequence<kLane...>) {
    using Bits = typename Lanes<T>::Bits;
    return as<T>(as<Bits>(v) ^ Vec<Bits>{(kLane % 2 == 0 ? Lanes<T>::kSign : Bits(0))...});
  }
};

/// As in torch.minimum, a NaN wins. -0 is below +0, so the result does not depend on the order.
template <class T>
struct Min : Operation<T> {
  using Operation<T>::Operation;
  FASTCOLL_INLINE Vec<T> combine(Vec<T> a, Vec<T> b) const {
    using Bits = typename Lanes<T>::Bits;
    // If a and b are unordered or equal, one select takes b and the other a. Equal: either the bits
    // are the same, or -0 | +0 = -0. Unordered: a NaN with more bits set is a NaN.
    const Vec<T> x = a < b ? a : b;
    const Vec<T> y = b < a ? b : a;
    return as<T>(as<Bits>(x) | as<Bits>(y));
  }
};

/// max(a, b) = -min(-a, -b)
template <class T>
struct Max : Min<T> {
  using Min<T>::Min;
  FASTCOLL_INLINE Vec<T> pre(Vec<T> v) const { return flipBits<T>(v, Lanes<T>::kSign); }
  FASTCOLL_INLINE Vec<T> post(Vec<T> v) const { return flipBits<T>(v, Lanes<T>::kSign); }
};

template <class Format, class Op>
struct FloatKernel {
  using Raw = typename Format::Raw;
  using Acc = typename Format::Acc;
  using V = Vec<typename Format::Lane>;
  static constexpr bool kCopiesOne = Op::kCopiesOne;
  static constexpr bool kLongTiles = Op::kLongTiles && sizeof(typename Format::Lane) == 4;

  explicit FloatKernel(const ReduceArgs& args) noexcept : op(args) {}
  FASTCOLL_INLINE Acc load(Raw raw) const { return pre(Format::unpack(raw)); }
  FASTCOLL_INLINE Raw store(Acc acc) const { return Format::pack(post(acc)); }
  FASTCOLL_INLINE V combine(V a, V b) const { return op.combine(a, b); }
  FASTCOLL_INLINE Pair combine(Pair a, Pair b) const {
    return {op.combine(a.low, b.low), op.combine(a.high, b.high)};
  }

 private:
  FASTCOLL_INLINE V pre(V v) const { return op.pre(v); }
  FASTCOLL_INLINE V post(V v) const { return op.post(v); }
  FASTCOLL_INLINE Pair pre(Pair v) const { return {op.pre(v.low), op.pre(v.high)}; }
  FASTCOLL_INLINE Pair post(Pair v) const { return {op.post(v.low), op.post(v.high)}; }
  Op op;
};
