// A fuzz target is a file that defines seeds() and LLVMFuzzerTestOneInput(), linked with libFuzzer.
// Its seeds are written into the folder FUZZ_CORPUS before the first run.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <string>
#include <vector>

namespace fuzz {

using Bytes = std::vector<std::uint8_t>;

/// Inputs that reach deep code: messages of a well-behaved peer.
std::vector<Bytes> seeds();

/// Ends the program if a condition on the code under test does not hold.
#define FUZZ_CHECK(condition)                                                      \
  do {                                                                             \
    if (!(condition)) {                                                            \
      std::fprintf(stderr, "%s:%d: not so: %s\n", __FILE__, __LINE__, #condition); \
      std::abort();                                                                \
    }                                                                              \
  } while (false)

/// Splits an input into parts; past its end, all values are zero.
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

extern "C" inline __attribute__((used)) int LLVMFuzzerInitialize(int*, char***) {
  const std::vector<fuzz::Bytes> all = fuzz::seeds();
  for (std::size_t i = 0; i < all.size(); ++i) {
    std::ofstream file(std::string(std::getenv("FUZZ_CORPUS")) + "/seed" + std::to_string(i),
                       std::ios::binary);
    file.write(reinterpret_cast<const char*>(all[i].data()),
               static_cast<std::streamsize>(all[i].size()));
    FUZZ_CHECK(file.flush());
  }
  return 0;
}
