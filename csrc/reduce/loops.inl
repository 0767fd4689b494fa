// The loops over memory, the same for every kernel. Each byte of a source is read once. Each byte
// of a destination is written once, after all sources were read there. So a destination may be a
// source.
//
// A kernel P turns sizeof(P::Raw) bytes into accumulators (load), folds them (combine) and turns
// them back (store). Elements do not mix, so the result does not depend on where a block begins.
// The last block is padded with zeros and handled in the same way.
//
// Bytes read: k * n; bytes written: n to each destination. Bound by memory, or by L2 if the segment
// is there.

template <class Raw>
FASTCOLL_INLINE Raw get(const char* from) {
  Raw raw;
  __builtin_memcpy(&raw, from, sizeof raw);
  return raw;
}

template <class Raw>
FASTCOLL_INLINE void put(char* to, Raw raw) {
  __builtin_memcpy(to, &raw, sizeof raw);
}

/// Most partial results that wait for their right halves. Enough for fewer than 2^(2 + kDeepest)
/// sources.
constexpr int kDeepest = 14;

/// The destinations of a result.
struct Targets {
  char* dst;
  char* copy;  // or nullptr

  template <class Raw>
  FASTCOLL_INLINE void put(std::size_t at, Raw raw) const {
    __builtin_memcpy(dst + at, &raw, sizeof raw);
    if (copy != nullptr) __builtin_memcpy(copy + at, &raw, sizeof raw);
  }
};

/// Two sources, the most important case, without a loop over sources. Returns where it stopped.
template <class P>
FASTCOLL_INLINE std::size_t twoSources(const P& p, Targets to, const char* a, const char* b,
                                       std::size_t bytes) {
  using Raw = typename P::Raw;
  std::size_t at = 0;
  FASTCOLL_UNROLL(4)
  for (; at + sizeof(Raw) <= bytes; at += sizeof(Raw))
    to.put(at, p.store(p.combine(p.load(get<Raw>(a + at)), p.load(get<Raw>(b + at)))));
  return at;
}

/// Folds 2^m sources from `first` on as the tree does: the left half with the right half.
/// `load(j, v)` is vector v of source j.
template <int kVectors, int kSources, class P, class Load>
FASTCOLL_INLINE void foldBlock(const P& p, const Load& load, int first,
                               typename P::Acc (&acc)[kVectors]) {
  if constexpr (kSources == 1) {
    FASTCOLL_UNROLL(8)
    for (int v = 0; v < kVectors; ++v) acc[v] = p.load(load(first, v));
  } else {
    typename P::Acc right[kVectors];
    foldBlock<kVectors, kSources / 2>(p, load, first, acc);
    foldBlock<kVectors, kSources / 2>(p, load, first + kSources / 2, right);
    FASTCOLL_UNROLL(8)
    for (int v = 0; v < kVectors; ++v) acc[v] = p.combine(acc[v], right[v]);
  }
}

/// Folds all sources as the tree does: blocks of four at once, then the last sources, fewer than
/// four, one by one. A partial result waits for a right half of its own size, as digits wait for a
/// carry in a binary counter. The partial results left at the end are the right end of the tree.
template <int kVectors, class P, class Load>
FASTCOLL_INLINE void fold(const P& p, const Load& load, int k, typename P::Acc (&acc)[kVectors]) {
  typename P::Acc left[kDeepest][kVectors];
  int waiting = 0;
  // Combines `acc` with the last waiting partial result, `carries` times.
  const auto carry = [&](int carries) __attribute__((always_inline)) {
    for (; carries > 0; --carries) {
      --waiting;
      FASTCOLL_UNROLL(8)
      for (int v = 0; v < kVectors; ++v) acc[v] = p.combine(left[waiting][v], acc[v]);
    }
  };
  const auto push = [&]() __attribute__((always_inline)) {
    FASTCOLL_UNROLL(8)
    for (int v = 0; v < kVectors; ++v) left[waiting][v] = acc[v];
    ++waiting;
  };
  const int blocks = k / 4;
  for (int block = 0; block < blocks; ++block) {
    foldBlock<kVectors, 4>(p, load, 4 * block, acc);
    carry(__builtin_ctz(~static_cast<unsigned>(block)));
    if (4 * block + 4 == k) return carry(waiting);
    push();
  }
  for (int j = 4 * blocks;; push()) {
    foldBlock<kVectors, 1>(p, load, j, acc);
    carry(j & 1);
    if (++j == k) return carry(waiting);
  }
}

/// Any number of sources, in tiles of kVectors whose accumulators stay in registers. A source's
/// pointer is loaded once per tile. Starts at `at` and returns where it stopped.
template <int kVectors, class P>
FASTCOLL_INLINE std::size_t manySources(const P& p, Targets to, const char* const* srcs, int k,
                                        std::size_t at, std::size_t bytes) {
  using Raw = typename P::Raw;
  constexpr std::size_t kTile = kVectors * sizeof(Raw);
  for (; at + kTile <= bytes; at += kTile) {
    typename P::Acc acc[kVectors];
    const auto load = [&](int j, int v) __attribute__((always_inline)) {
      return get<Raw>(srcs[j] + at + v * sizeof(Raw));
    };
    fold<kVectors>(p, load, k, acc);
    FASTCOLL_UNROLL(8)
    for (int v = 0; v < kVectors; ++v) to.put(at + v * sizeof(Raw), p.store(acc[v]));
  }
  return at;
}

/// One vector at a time, also the last bytes, fewer than a vector.
template <class P>
void rest(const P& p, Targets to, const char* const* srcs, int k, std::size_t at,
          std::size_t bytes) {
  using Raw = typename P::Raw;
  for (; at < bytes; at += sizeof(Raw)) {
    const std::size_t take = bytes - at < sizeof(Raw) ? bytes - at : sizeof(Raw);
    typename P::Acc acc[1];
    const auto load = [&](int j, int) __attribute__((always_inline)) {
      Raw raw{};
      if (take == sizeof raw) return get<Raw>(srcs[j] + at);
      __builtin_memcpy(&raw, srcs[j] + at, take);
      return raw;
    };
    fold<1>(p, load, k, acc);
    const Raw raw = p.store(acc[0]);
    if (take == sizeof raw) {
      to.put(at, raw);
      continue;
    }
    __builtin_memcpy(to.dst + at, &raw, take);
    if (to.copy != nullptr) __builtin_memcpy(to.copy + at, &raw, take);
  }
}

/// Whether the kernel has all loops. Loops take long to compile, and few x86-64 processors lack
/// AVX2: there only the sums of gradients have all.
template <class P>
constexpr bool kAllLoops = kWidth > 16 || !kIsX86 || P::kLongTiles;

/// Not inlined, because sums of complex numbers share the code of sums of their float parts.
template <class P>
__attribute__((noinline)) void reduce(const ReduceArgs& args, std::size_t bytes) noexcept {
  const P p(args);
  const Targets to{static_cast<char*>(args.dst), static_cast<char*>(args.copy)};
  const char* const* const srcs = reinterpret_cast<const char* const*>(args.srcs);
  const int k = args.k;
  if (bytes == 0) return;
  if (P::kCopiesOne && k == 1) {
    if (to.copy != nullptr && to.copy != srcs[0]) __builtin_memcpy(to.copy, srcs[0], bytes);
    if (to.dst != srcs[0]) __builtin_memcpy(to.dst, srcs[0], bytes);
    return;
  }

  std::size_t at = 0;
  if (k == 2) {
    // Two calls, so that the compiler makes a loop with a copy and a loop without one.
    at = kAllLoops<P> && to.copy == nullptr
             ? twoSources(p, Targets{to.dst, nullptr}, srcs[0], srcs[1], bytes)
             : twoSources(p, to, srcs[0], srcs[1], bytes);
  } else if constexpr (kAllLoops<P>) {
    // Long tiles if there are too many streams for the prefetcher, else short ones. Only the sums
    // of gradients have both, because a loop takes long to compile.
    constexpr int kShort = sizeof(typename P::Acc) == kWidth ? 4 : 2;
    if constexpr (P::kLongTiles) {
      if (k > 8) at = manySources<2 * kShort>(p, to, srcs, k, at, bytes);
    }
    at = manySources<kShort>(p, to, srcs, k, at, bytes);
  }
  if (at < bytes) rest(p, to, srcs, k, at, bytes);
}

template <class P, std::size_t kElement>
void kernel(const ReduceArgs& args) noexcept {
  reduce<P>(args, args.count * kElement);
}

/// AVG, by a multiplication if that gives the same bits.
template <class Format, std::size_t kElement>
void averageKernel(const ReduceArgs& args) noexcept {
  using Lane = typename Format::Lane;
  if (hasExactReciprocal(Lane(args.divisor)))
    kernel<FloatKernel<Format, SumThenScale<Lane>>, kElement>(args);
  else
    kernel<FloatKernel<Format, SumThenDivide<Lane>>, kElement>(args);
}

/// AVG of integers, as NCCL defines it: the sum, which wraps around, is divided by the number of
/// ranks, and the quotient is cut towards zero. The division has 64 bits, because there may be more
/// ranks than T can count. It is a separate pass, because no CPU divides vectors of integers.
template <class T>
void integerAverage(const ReduceArgs& args) noexcept {
  using Wide = std::conditional_t<std::is_signed_v<T>, std::int64_t, std::uint64_t>;
  ReduceArgs sum = args;
  sum.copy = nullptr;
  kernel<IntegerKernel<typename Lanes<T>::Bits, Add>, sizeof(T)>(sum);
  const Wide divisor = Wide(args.divisor);
  char* const dst = static_cast<char*>(args.dst);
  for (std::size_t at = 0; at < args.count * sizeof(T); at += sizeof(T)) {
    put(dst + at, T(Wide(get<T>(dst + at)) / divisor));
  }
  if (args.copy != nullptr && args.count != 0) {
    __builtin_memcpy(args.copy, dst, args.count * sizeof(T));
  }
}
