// Integers, which wrap around as in torch, and bool, where any nonzero byte is true.

// Additions and multiplications use unsigned lanes, where wrapping around is defined.
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
  static constexpr bool kLongTiles = false;

  explicit IntegerKernel(const ReduceArgs&) noexcept {}
  FASTCOLL_INLINE Acc load(Raw raw) const { return raw; }
  FASTCOLL_INLINE Acc combine(Acc a, Acc b) const { return Op::combine(a, b); }
  FASTCOLL_INLINE Raw store(Acc acc) const { return acc; }
};

template <class Op>
struct BoolKernel {
  using Raw = Vec<std::uint8_t>;
  using Acc = Raw;
  static constexpr bool kCopiesOne = false;  // a byte 2 becomes 1
  static constexpr bool kLongTiles = false;

  explicit BoolKernel(const ReduceArgs&) noexcept {}
  FASTCOLL_INLINE Acc load(Raw raw) const {
    const Raw one = broadcast<std::uint8_t>(1);
    return raw < one ? raw : one;
  }
  FASTCOLL_INLINE Acc combine(Acc a, Acc b) const { return Op::combine(a, b); }
  FASTCOLL_INLINE Raw store(Acc acc) const { return acc; }
};
