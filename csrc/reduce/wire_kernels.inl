// Kernels beside the reductions: float32 in memory to 16 bits on the wire and back, and sums of
// squares. Bound by memory.

template <class Format>
void narrowAll(void* to, const void* from, std::size_t count) noexcept {
  constexpr std::size_t kLanes = kWidth / sizeof(float);
  char* const out = static_cast<char*>(to);
  const char* const in = static_cast<const char*>(from);
  std::size_t i = 0;
  FASTCOLL_UNROLL(4)
  for (; i + kLanes <= count; i += kLanes)
    put(out + 2 * i, Format::narrow(get<Vec<float>>(in + 4 * i)));
  if (i == count) return;
  Vec<float> last{};
  __builtin_memcpy(&last, in + 4 * i, 4 * (count - i));
  const Half half = Format::narrow(last);
  __builtin_memcpy(out + 2 * i, &half, 2 * (count - i));
}

template <class Format>
void widenAll(void* to, const void* from, std::size_t count) noexcept {
  constexpr std::size_t kLanes = kWidth / sizeof(float);
  char* const out = static_cast<char*>(to);
  const char* const in = static_cast<const char*>(from);
  std::size_t i = 0;
  FASTCOLL_UNROLL(4)
  for (; i + kLanes <= count; i += kLanes) put(out + 4 * i, Format::widen(get<Half>(in + 2 * i)));
  if (i == count) return;
  Half last{};
  __builtin_memcpy(&last, in + 2 * i, 2 * (count - i));
  const Vec<float> wide = Format::widen(last);
  __builtin_memcpy(out + 4 * i, &wide, 4 * (count - i));
}

/// One vector of doubles from as many elements of T.
template <class T>
FASTCOLL_INLINE Vec<double> doubles(const char* from) {
  using Few = typename VectorOf<T, kWidth / sizeof(double) * sizeof(T)>::type;
  return __builtin_convertvector(get<Few>(from), Vec<double>);
}

/// In four partial sums, so additions need not wait for each other.
template <class T>
double squaresOf(const void* from, std::size_t count) noexcept {
  constexpr std::size_t kLanes = kWidth / sizeof(double);
  const char* const in = static_cast<const char*>(from);
  Vec<double> sums[4] = {};
  std::size_t i = 0;
  for (; i + 4 * kLanes <= count; i += 4 * kLanes) {
    FASTCOLL_UNROLL(4)
    for (std::size_t s = 0; s < 4; ++s) {
      const Vec<double> v = doubles<T>(in + (i + s * kLanes) * sizeof(T));
      sums[s] += v * v;
    }
  }
  const Vec<double> all = (sums[0] + sums[1]) + (sums[2] + sums[3]);
  double total = 0;
  for (std::size_t lane = 0; lane < kLanes; ++lane) total += all[lane];
  for (; i < count; ++i) {
    T value;
    __builtin_memcpy(&value, in + i * sizeof(T), sizeof value);
    total += static_cast<double>(value) * static_cast<double>(value);
  }
  return total;
}

/// Through a block of float32, which stays in the first-level cache.
template <class Format>
double squaresOfHalves(const void* from, std::size_t count) noexcept {
  constexpr std::size_t kBlock = 1024;
  float block[kBlock];
  double total = 0;
  for (std::size_t i = 0; i < count; i += kBlock) {
    const std::size_t length = count - i < kBlock ? count - i : kBlock;
    widenAll<Format>(block, static_cast<const char*>(from) + 2 * i, length);
    total += squaresOf<float>(block, length);
  }
  return total;
}
