// Integers, which wrap around as in torch, and bool, of which any nonzero byte is true.

// Adding and multiplying are done on unsigned lanes, where wrapping around is defined.
struct Add {
  template <class V>
  static FASTCOLL_INLINE V combine(V a, V b) {
    return a + b;
  }
};
struct Multiply {
  template <class V>
  static FASTCOLL_INLINE V combine(V a, V b) {
    return a * b;
  }
};
struct Lower {
  template <class V>
  static FASTCOLL_INLINE V combine(V a, V b) {
    return a < b ? a : b;
  }
};
struct Higher {
  template <class V>
  static FASTCOLL_INLINE V combine(V a, V b) {
    return a < b ? b : a;
  }
};
struct And {
  template <class V>
  static FASTCOLL_INLINE V combine(V a, V b) {
    return a & b;
  }
};
struct Or {
  template <class V>
  static FASTCOLL_INLINE V combine(V a, V b) {
    return a | b;
  }
};
struct Xor {
  template <class V>
  static FASTCOLL_INLINE V combine(V a, V b) {
    return a ^ b;
  }
};

template <class T, class Op>
struct IntegerKernel {
  using Raw = Vec<T>;
  using Acc = Raw;
  static constexpr bool kCopiesOne = true;

  explicit IntegerKernel(const ReduceArgs&) noexcept {}
  FASTCOLL_INLINE Acc load(Raw raw) const { return raw; }
  FASTCOLL_INLINE Acc combine(Acc a, Acc b) const { return Op::combine(a, b); }
  FASTCOLL_INLINE Raw store(Acc acc) const { return acc; }
};

/// AVG of integers, as NCCL defines it: the sum, which wraps around, is divided by the number of
/// sources, and the quotient is cut towards zero. Divided in 64 bits: there may be more sources
/// than T can count.
template <class T>
struct IntegerAverage {
  using Raw = Vec<typename Lanes<T>::Bits>;
  using Acc = Raw;
  using Wide = std::conditional_t<std::is_signed_v<T>, std::int64_t, std::uint64_t>;
  static constexpr bool kCopiesOne = false;  // the divisor is not the number of the sources here

  explicit IntegerAverage(const ReduceArgs& args) noexcept : divisor_(Wide(args.divisor)) {}
  FASTCOLL_INLINE Acc load(Raw raw) const { return raw; }
  FASTCOLL_INLINE Acc combine(Acc a, Acc b) const { return a + b; }
  FASTCOLL_INLINE Raw store(Acc acc) const {
    Vec<T> sums = as<T>(acc);
    for (std::size_t i = 0; i < sizeof sums / sizeof(T); ++i) sums[i] = T(Wide(sums[i]) / divisor_);
    return as<typename Lanes<T>::Bits>(sums);
  }

 private:
  Wide divisor_;
};

template <class Op>
struct BoolKernel {
  using Raw = Vec<std::uint8_t>;
  using Acc = Raw;
  static constexpr bool kCopiesOne = false;  // a byte 2 becomes 1

  explicit BoolKernel(const ReduceArgs&) noexcept {}
  FASTCOLL_INLINE Acc load(Raw raw) const {
    const Raw one = broadcast<std::uint8_t>(1);
    return raw < one ? raw : one;
  }
  FASTCOLL_INLINE Acc combine(Acc a, Acc b) const { return Op::combine(a, b); }
  FASTCOLL_INLINE Raw store(Acc acc) const { return acc; }
};
