// Fuzzes a peer's mapped memory: a broken peer may write any directory, control block and offsets.
// Nothing outside the mapping may be touched; unmapped pages surround it.
//   input: 8-byte words to write, each with its place
#include <sys/mman.h>

#include <cstring>

#include "fuzz_target.hpp"
#include "shm/group_memory.hpp"

using namespace fastcoll;

namespace {

constexpr std::uint64_t kNonce = 77;
constexpr std::size_t kBytes = std::size_t{256} << 10;
constexpr std::size_t kBlock = 128 << 10;
constexpr int kSize = 3;

/// A mapping with an unmapped page on both sides.
std::uint8_t* mapAlone() {
  auto* whole = static_cast<std::uint8_t*>(
      ::mmap(nullptr, kBytes + 2 * kPage, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0));
  if (whole == MAP_FAILED) std::abort();
  ::mprotect(whole + kPage, kBytes, PROT_READ | PROT_WRITE);
  return whole + kPage;
}

void fillWell(std::uint8_t* base, std::uint64_t nonce) {
  auto* header = reinterpret_cast<ArenaHeader*>(base);
  header->magic = kArenaMagic;
  header->abi = kAbiVersion;
  header->pid = 4711;
  header->bytes = kBytes;
  header->life = 5;
  auto* entry = reinterpret_cast<DirectoryEntry*>(base + ArenaHeader::kDirectoryOffset) +
                kNonce % ArenaHeader::kDirectoryEntries;
  entry->offset = kBlock;
  entry->nonce = nonce;
  auto* block = reinterpret_cast<ControlBlock*>(base + kBlock);
  block->nonce = nonce;
  block->rank = 1;
  block->size = kSize;
}

}  // namespace

std::vector<fuzz::Bytes> fuzz::seeds() {
  // Places of the words that are read, in words of 8 bytes: header, directory entry, block.
  const std::size_t places[] = {0,
                                1,
                                offsetof(ArenaHeader, life) / 8,
                                (ArenaHeader::kDirectoryOffset + 16 * kNonce) / 8,
                                (ArenaHeader::kDirectoryOffset + 16 * kNonce) / 8 + 1,
                                kBlock / 8,
                                kBlock / 8 + 1,
                                (kBlock + offsetof(ControlBlock, largeRing)) / 8,
                                (kBlock + offsetof(ControlBlock, arrivals)) / 8 + 3,
                                (kBlock + offsetof(ControlBlock, abort)) / 8};
  const std::uint64_t values[] = {0,
                                  1,
                                  kBytes,
                                  kBytes - 8,
                                  kBlock + 8,
                                  kBytes - kPage,
                                  ~std::uint64_t{0},
                                  kNonce,
                                  std::uint64_t{1} << 63};
  std::vector<Bytes> all{{}};
  for (const std::size_t place : places) {
    for (const std::uint64_t value : values) {
      Bytes input{static_cast<std::uint8_t>(place), static_cast<std::uint8_t>(place >> 8)};
      const auto* bytes = reinterpret_cast<const std::uint8_t*>(&value);
      input.insert(input.end(), bytes, bytes + 8);
      all.push_back(input);
    }
  }
  return all;
}

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  static const auto process = LocalProcess::get();
  static std::unique_ptr<GroupMemory> memory;
  static std::uint64_t uses = 0;
  // A new instance of the peer each time, in the same directory entry.
  const std::uint64_t nonce = kNonce + ++uses * ArenaHeader::kDirectoryEntries;
  if (memory == nullptr || uses % 512 == 0) {
    memory.reset();
    GroupIdentity identity;
    identity.name = "fuzz";
    identity.size = kSize;
    identity.nonce = 3;
    memory = std::make_unique<GroupMemory>(process, identity);
    memory->open(std::size_t{64} << 20);
  }
  std::uint8_t* base = mapAlone();
  fillWell(base, nonce);
  for (fuzz::Reader input(data, size); input.left() >= 10;) {
    const std::size_t place = input.word();
    const fuzz::Bytes value = input.take(8);
    std::memcpy(base + 8 * (place % (kBytes / 8)), value.data(), 8);
  }
  auto peer = std::make_shared<PeerProcess>(base, kBytes);
  try {
    if (memory->bind(1, peer, nonce)) {
      const ControlBlock& block = memory->block(1);
      FUZZ_CHECK(reinterpret_cast<const std::uint8_t*>(&block) >= base);
      FUZZ_CHECK(reinterpret_cast<const std::uint8_t*>(&block) + ControlBlock::bytes(kSize) <=
                 base + kBytes);
      FUZZ_CHECK(memory->memberName(1).size() < 200);
      memory->isDead(1);
      memory->hasLeft(1);
      memory->isMutual(1, nonce);
      for (const std::uint64_t offset : {block.largeRing.load(), block.arrivals[0].offer.direct,
                                         block.signatures[1].signature.count}) {
        for (const std::size_t bytes : {std::size_t{1}, std::size_t{16384}, ~std::size_t{0}}) {
          try {
            const std::uint8_t* there = memory->inPeer(1, offset, bytes);
            FUZZ_CHECK(there > base && bytes <= kBytes && there + bytes <= base + kBytes);
          } catch (const Error&) {
          }
        }
      }
    }
  } catch (const Error& error) {
    FUZZ_CHECK(error.what()[0] != '\0');
  }
  peer.reset();
  process->prune();
  ::munmap(base - kPage, kPage);
  ::munmap(base + kBytes, kPage);
  return 0;
}
