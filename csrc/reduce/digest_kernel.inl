// The sum of words times keys, of csrc/reduce/digest.hpp. The compiler makes vectors of the loop.

std::uint64_t digestWords(const void* from, const std::uint32_t* keys, std::size_t words) noexcept {
  const char* const in = static_cast<const char*>(from);
  std::uint64_t sum = 0;
  for (std::size_t i = 0; i < words; ++i) {
    sum += std::uint64_t(get<std::uint32_t>(in + i * sizeof *keys)) * keys[i];
  }
  return sum;
}
