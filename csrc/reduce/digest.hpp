// A digest of bytes: 64 bits that tell whether two messages have the same bits.
//
//   digest = sum of w(i) k(i mod 1024) K(i div 1024) mod 2^64, over the 32-bit words w(i)
//
// This is multilinear hashing (Lemire and Kaser, Strongly universal string hashing is fast, 2014)
// with fixed keys. As a sum, it does not depend on the order in which parts of a message are added.
// All keys are odd, so a change of one word always changes it. So does an exchange of two words in
// one block of 1024. Other changes stay unseen with a probability of about 2^-32. Zeros add
// nothing. It does not resist chosen inputs.
#pragma once

#include <cstddef>
#include <cstdint>

namespace fastcoll {

/// What `bytes` at `data` add to the digest of a message that has them at `offset`.
std::uint64_t digestOf(std::size_t offset, const void* data, std::size_t bytes) noexcept;

/// The odd key of a block, or of a message in a list of messages.
constexpr std::uint64_t digestKey(std::uint64_t number) {
  // The finalizer of SplitMix64 (Steele, Lea and Flood, 2014).
  std::uint64_t key = (number + 1) * 0x9e3779b97f4a7c15ull;
  key = (key ^ (key >> 30)) * 0xbf58476d1ce4e5b9ull;
  key = (key ^ (key >> 27)) * 0x94d049bb133111ebull;
  return (key ^ (key >> 31)) | 1;
}

}  // namespace fastcoll
