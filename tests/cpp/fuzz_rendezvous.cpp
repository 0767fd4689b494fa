// Fuzzes the store: any process that reaches it can write any bytes under any key. The input stands
// for records, votes, decisions and the monitored barrier's answers. Only fastcoll::Error may be
// thrown, in time.
//   input: settings, then for each key that is read: a kind of answer, and bytes
#include <unistd.h>

#include <cstring>
#include <map>

#include "base/error.hpp"
#include "base/settings.hpp"
#include "base/topology.hpp"
#include "fuzz_target.hpp"
#include "group/rendezvous.hpp"

using namespace fastcoll;

namespace {

constexpr std::size_t kArenaBytes = std::size_t{64} << 20;

template <std::size_t Size>
void setText(char (&field)[Size], const std::string& value) {
  std::strncpy(field, value.c_str(), Size - 1);
}

GroupRecord goodRecord(int rank, int size) {
  GroupRecord record{};
  record.magic = kArenaMagic;
  record.abi = kAbiVersion;
  record.bytesOfThis = sizeof record;
  record.nonce = 0x1234567890abcdefull + static_cast<std::uint64_t>(rank);
  record.generation = restartGeneration();
  record.process.nonce = {7, static_cast<std::uint8_t>(rank)};
  record.process.socketName = {9, static_cast<std::uint8_t>(rank)};
  static const std::uint64_t network = networkNamespace(), pids = pidNamespace();
  static const std::string boot = bootId(), host = hostName();
  record.networkNamespace = network;
  record.pidNamespace = pids;
  record.rank = static_cast<std::uint32_t>(rank);
  record.size = static_cast<std::uint32_t>(size);
  record.uid = ::geteuid();
  record.ringBytes = 16384;
  setText(record.bootId, boot);
  setText(record.host, host);
  setText(record.version, "1.0");
  return record;
}

/// Answers from the input. A key is read many times, and its value may change in between.
class HostileStore : public KeyValueStore {
 public:
  HostileStore(fuzz::Reader input, int size) : input_(input), size_(size) {}
  void set(const std::string& key, const std::string& value) override { values_[key] = value; }
  bool tryGet(const std::string& key, std::string& value) override {
    const std::uint8_t how = input_.byte();
    if (how % 8 == 0) return false;
    if (const auto own = values_.find(key); own != values_.end() && how % 8 == 1) {
      value = own->second;
      return true;
    }
    if (how % 8 <= 5 && key.rfind("fastcoll/r/", 0) == 0) {
      const int rank = std::atoi(key.c_str() + std::strlen("fastcoll/r/"));
      const GroupRecord record = goodRecord(rank, size_);
      value.assign(reinterpret_cast<const char*>(&record), sizeof record);
      // Some of its bytes are changed.
      for (int i = how >> 6; i > 0; --i) {
        value[input_.word() % value.size()] = static_cast<char>(input_.byte());
      }
      return true;
    }
    if (key.rfind("fastcoll/f/", 0) == 0) {
      const fuzz::Bytes text = input_.take(how % 8 == 7 ? 2000 : how);
      value = "BTSNX"[how % 5] + std::string(how % 3 == 0 ? "" : "1700000000000 ") +
              std::string(text.begin(), text.end());
      return true;
    }
    if (how % 8 <= 5 && key.rfind("/roster") != std::string::npos) {
      return listOf(
          [&](int rank) {
            std::string one;
            const auto own = values_.find(concat("fastcoll/r/", rank));
            const GroupRecord good = goodRecord(rank, size_);
            one.assign(reinterpret_cast<const char*>(&good), sizeof good);
            return own == values_.end() ? one : own->second;
          },
          how >> 6, value);
    }
    if (how % 8 <= 3) {
      const auto vote = [how](int) { return std::string(how % 16 < 8 ? "shm" : "apart: because"); };
      if (key.back() == 'v') return listOf(vote, how >> 6, value);
      value = vote(0);
      return true;
    }
    const fuzz::Bytes bytes = input_.take(how % 8 == 7 ? 2000 : how);
    value.assign(bytes.begin(), bytes.end());
    return true;
  }

 private:
  /// Rank 0's list of all ranks, with some bytes changed.
  template <typename Of>
  bool listOf(Of of, int others, std::string& value) {
    value.clear();
    for (int rank = 0; rank < size_; ++rank) {
      const std::string one = of(rank);
      const auto length = static_cast<std::uint32_t>(one.size());
      value.append(reinterpret_cast<const char*>(&length), sizeof length);
      value += one;
    }
    for (; others > 0; --others) {
      value[input_.word() % value.size()] = static_cast<char>(input_.byte());
    }
    return true;
  }
  fuzz::Reader input_;
  const int size_;
  std::map<std::string, std::string> values_;
};

template <typename Call>
void attempt(Call call) {
  try {
    call();
  } catch (const Error& error) {
    FUZZ_CHECK(error.what()[0] != '\0' && std::strlen(error.what()) < 4000);
  }
}

}  // namespace

std::vector<fuzz::Bytes> fuzz::seeds() {
  std::vector<Bytes> all;
  for (const std::uint8_t settings : {0x00, 0x01, 0x02, 0x03, 0x04, 0x05, 0x0c, 0x0d}) {
    for (const std::uint8_t answer : {2, 3, 4, 0x45, 0x85, 6, 7, 1}) {
      Bytes input{settings};
      for (int i = 0; i < 60; ++i) {
        input.push_back(answer);
        input.push_back(static_cast<std::uint8_t>(3 * i));
      }
      all.push_back(input);
      all.push_back(Bytes(1, settings));
      all.back().insert(all.back().end(), 60, answer);
    }
  }
  return all;
}

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  fuzz::Reader input(data, size);
  const std::uint8_t settings = input.byte();
  const int ranks = 2 + settings / 2 % 2;
  const int rank = settings % 2;
  static const auto process = LocalProcess::get();
  HostileStore store(input, ranks);
  GroupRecord own = goodRecord(rank, ranks);
  own.process = process->address();
  // Over Gloo only the store is waited for; over shared memory the sockets are tried too.
  own.sharedMemory = (settings & 4) != 0 ? SharedMemoryChoice::Auto : SharedMemoryChoice::Off;
  own.processBegan = (settings & 8) != 0 ? 0 : ~std::uint64_t{0};
  GroupIdentity identity;
  identity.name = "fuzz";
  identity.rank = rank;
  identity.size = ranks;
  identity.nonce = own.nonce;
  GroupMemory memory(process, identity);
  Rendezvous rendezvous(store, memory, *process, own, kArenaBytes);
  const auto soon = [] { return Clock::now() + Milliseconds(1); };
  attempt([&] { rendezvous.publish(); });
  attempt([&] {
    const Agreement agreement = rendezvous.agree(soon(), Milliseconds(1));
    FUZZ_CHECK(agreement.hosts.local().size() == 1);  // no other rank shares memory
    FUZZ_CHECK(agreement.reason.size() < 4000);
  });
  attempt([&] { (void)rendezvous.coresEachIfKnown(); });
  attempt([&] { FUZZ_CHECK(rendezvous.tryMeet(1 - rank) != Rendezvous::Met::Here); });
  attempt([&] {
    std::string name;
    const bool ask = (settings & 16) != 0;
    const bool both = rendezvous.tryConnect(1 - rank, ask, name) == Rendezvous::Met::Here;
    FUZZ_CHECK(!both || name.size() == 33);
    if (both) FUZZ_CHECK(rendezvous.faultKeyOf(1 - rank).size() < 100);
  });
  attempt([&] {
    for (const std::string& key : rendezvous.faultKeys()) {
      const Fault first = writeFault(store, key, {ErrorKind::Value, "a text"});
      FUZZ_CHECK(first.text == "a text" || first.kind != ErrorKind::Value);
      const auto found = readFault(store, key);
      FUZZ_CHECK(!found || (!found->text.empty() && found->text.size() <= 1000));
    }
  });
  attempt(
      [&] { rendezvous.monitoredBarrier(Milliseconds(rank == 0 ? 1 : 0), (settings & 8) != 0); });
  return 0;
}
