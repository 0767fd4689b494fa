// Integers, which wrap around as in torch, and bool, where any nonzero byte is true.

// Additions and multiplications use unsigned lanes, where wrapping around is defined.
#define FASTCOLL_OPERATION(name, result)         \
  struct name {                                  \
    template <class V>                           \
    static FASTCOLL_INLINE V combine(V a, V b) { \
      return result;                             \
    }                                            \
  };
FASTCOLL_OPERATION(Add, (a + b))
FASTCOLL_OPERATION(Multiply, (a * b))
FASTCOLL_OPERATION(Lower, a < b ? a : b)
FASTCOLL_OPERATION(Higher, a < b ? b : a)
FASTCOLL_OPERATION(And, (a & b))
FASTCOLL_OPERATION(Or, (a | b))
FASTCOLL_OPERATION(Xor, (a ^ b))
#undef FASTCOLL_OPERATION

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
struct BoolKernel : IntegerKernel<std::uint8_t, Op> {
  using IntegerKernel<std::uint8_t, Op>::IntegerKernel;
  using Raw = Vec<std::uint8_t>;
  static constexpr bool kCopiesOne = false;  // a byte 2 becomes 1
  FASTCOLL_INLINE Raw load(Raw raw) const {
    const Raw one = broadcast<std::uint8_t>(1);
    return raw < one ? raw : one;
  }
};
