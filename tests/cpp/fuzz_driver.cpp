// Mutates a target's seeds for some time, reproducibly: the same seed and number of runs give the
// same inputs. Without coverage, so the seeds must go deep by themselves.
//   fuzz_<target> [seconds] [seed] [file...]      with files: runs only those
//   fuzz_<target> --seeds FOLDER                  writes the seeds there
#include <chrono>
#include <cstring>
#include <fstream>
#include <iterator>
#include <random>
#include <string>

#include "fuzz_target.hpp"

namespace {

using fuzz::Bytes;
using Random = std::mt19937_64;

Bytes current;  // for the report of a crash

extern "C" void __sanitizer_set_death_callback(void (*)()) __attribute__((weak));

bool write(const std::string& name, const Bytes& input) {
  std::ofstream file(name, std::ios::binary);
  file.write(reinterpret_cast<const char*>(input.data()),
             static_cast<std::streamsize>(input.size()));
  return static_cast<bool>(file.flush());
}

int writeSeeds(const std::string& folder) {
  const std::vector<Bytes> all = fuzz::seeds();
  for (std::size_t i = 0; i < all.size(); ++i) {
    const std::string name = folder + "/seed" + std::to_string(i);
    if (!write(name, all[i])) {
      std::fprintf(stderr, "cannot write %s\n", name.c_str());
      return 1;
    }
  }
  return 0;
}

void keepInput() {
  write("crash.input", current);
  std::fprintf(stderr, "the input is in crash.input (%zu bytes)\n", current.size());
}

std::size_t below(Random& random, std::size_t bound) {
  return bound == 0 ? 0 : random() % bound;
}

void mutate(Bytes& input, const std::vector<Bytes>& all, Random& random) {
  static const std::uint8_t interesting[] = {0, 1, 2, 0x7f, 0x80, 0xfe, 0xff};
  const std::size_t at = below(random, input.size());
  switch (random() % 8) {
    case 0:
      if (!input.empty()) input[at] ^= static_cast<std::uint8_t>(1u << random() % 8);
      break;
    case 1:
      if (!input.empty()) input[at] = static_cast<std::uint8_t>(random());
      break;
    case 2:
      if (!input.empty()) input[at] = interesting[random() % sizeof interesting];
      break;
    case 3:  // a whole number: lengths, offsets, counts
      if (input.size() >= at + 8) {
        std::uint64_t number = random() >> random() % 64;
        if (random() % 2 == 0) number = ~number;
        std::memcpy(input.data() + at, &number, 8);
      }
      break;
    case 4:
      input.resize(below(random, input.size() + 1));
      break;
    case 5:
      input.insert(input.begin() + static_cast<std::ptrdiff_t>(at), 1 + random() % 40,
                   static_cast<std::uint8_t>(random()));
      break;
    case 6:
      if (!input.empty()) {
        const std::size_t count = 1 + below(random, input.size() - at);
        input.erase(input.begin() + static_cast<std::ptrdiff_t>(at),
                    input.begin() + static_cast<std::ptrdiff_t>(at + count));
      }
      break;
    default: {  // the end of another one
      const Bytes& other = all[below(random, all.size())];
      const std::size_t from = below(random, other.size());
      input.resize(at);
      input.insert(input.end(), other.begin() + static_cast<std::ptrdiff_t>(from), other.end());
    }
  }
  if (input.size() > 4096) input.resize(4096);
}

}  // namespace

int main(int count, char** arguments) {
  if (count == 3 && std::strcmp(arguments[1], "--seeds") == 0) return writeSeeds(arguments[2]);
  const double seconds = count > 1 ? std::atof(arguments[1]) : 10.0;
  const std::uint64_t seed = count > 2 ? std::strtoull(arguments[2], nullptr, 0) : 1;
  if (__sanitizer_set_death_callback != nullptr) __sanitizer_set_death_callback(keepInput);
  for (int i = 3; i < count; ++i) {
    std::ifstream file(arguments[i], std::ios::binary);
    current.assign(std::istreambuf_iterator<char>(file), {});
    LLVMFuzzerTestOneInput(current.data(), current.size());
  }
  if (count > 3) return 0;
  const std::vector<Bytes> all = fuzz::seeds();
  for (const Bytes& input : all) {
    current = input;
    LLVMFuzzerTestOneInput(current.data(), current.size());
  }
  Random random(seed);
  const auto end = std::chrono::steady_clock::now() + std::chrono::duration<double>(seconds);
  std::uint64_t runs = all.size();
  while (std::chrono::steady_clock::now() < end) {
    current = all[below(random, all.size())];
    const std::size_t changes = 1 + below(random, 6);
    for (std::size_t i = 0; i < changes; ++i) mutate(current, all, random);
    // A copy of its exact size, so that a read past its end is seen.
    const Bytes exact(current);
    LLVMFuzzerTestOneInput(exact.data(), exact.size());
    ++runs;
  }
  std::printf("%llu inputs from %zu seeds in %.0f s, seed %llu\n",
              static_cast<unsigned long long>(runs), all.size(), seconds,
              static_cast<unsigned long long>(seed));
  return 0;
}
