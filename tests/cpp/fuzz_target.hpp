// A fuzz target is a file with these two functions. fuzz_driver.cpp mutates its seeds; with clang
// the same file is linked with -fsanitize=fuzzer besides, and the driver writes the first corpus.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <vector>

namespace fuzz {

using Bytes = std::vector<std::uint8_t>;

/// Inputs that go deep: what a well-behaved peer sends.
std::vector<Bytes> seeds();

/// Ends the program where the code under test breaks a promise.
#define FUZZ_CHECK(condition)                                                      \
  do {                                                                             \
    if (!(condition)) {                                                            \
      std::fprintf(stderr, "%s:%d: not so: %s\n", __FILE__, __LINE__, #condition); \
      std::abort();                                                                \
    }                                                                              \
  } while (false)

/// Takes an input apart; when it is used up, everything is zero.
class Reader {
 public:
  Reader(const std::uint8_t* data, std::size_t size) : data_(data), size_(size) {}
  std::uint8_t byte() { return at_ < size_ ? data_[at_++] : 0; }
  std::uint16_t word() {
    const std::uint16_t low = byte();
    return static_cast<std::uint16_t>(low | byte() << 8);
  }
  std::size_t left() const { return size_ - at_; }
  const std::uint8_t* rest() const { return data_ + at_; }
  /// Up to `most` bytes.
  Bytes take(std::size_t most) {
    const std::size_t count = most < left() ? most : left();
    Bytes taken(rest(), rest() + count);
    at_ += count;
    return taken;
  }

 private:
  const std::uint8_t* data_;
  std::size_t size_;
  std::size_t at_ = 0;
};

}  // namespace fuzz

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size);
