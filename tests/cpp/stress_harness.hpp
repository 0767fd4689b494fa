// Shared by the stress tests: a key-value store in memory or in a folder, ranks as threads or
// processes, checks, and collectives whose result is known element by element.
#pragma once

#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "cpu/cpu_engine.hpp"
#include "memory_network.hpp"

namespace stress {

using namespace fastcoll;
using Engine = std::shared_ptr<CpuEngine>;
using Random = std::mt19937_64;

/// Throws with file, line and text; a test fails if a rank's function throws.
#define REQUIRE(condition, ...)                                                            \
  do {                                                                                     \
    if (!(condition)) {                                                                    \
      throw std::runtime_error(                                                            \
          fastcoll::concat(__FILE__, ":", __LINE__, ": " #condition ": ", ##__VA_ARGS__)); \
    }                                                                                      \
  } while (false)

struct GroupOptions {
  std::size_t ringBytes = 16384;  // small, so a little data takes many segments
  TuningTable tuning;
  int spinMicros = -1;
  std::string sharedMemory = "require";
  std::string hostId;
  std::string digest = "off";
  int threads = 1;
  std::shared_ptr<Network> network = std::make_shared<MemoryNetwork>();
};

/// One rank of a test.
class Rank {
 public:
  Rank(std::shared_ptr<KeyValueStore> store, int rank, int size, bool process)
      : rank(rank), size(size), process(process), store_(std::move(store)) {}

  const int rank;
  const int size;
  const bool process;  // ranks are processes

  /// A group of all ranks; `name` is its prefix in the store.
  Engine group(const std::string& name, const GroupOptions& options = {}) const;
  /// A group that has worked. No rank is in its first collective any more, so a fault that follows
  /// does not end it.
  Engine usedGroup(const std::string& name, const GroupOptions& options = {});
  /// Waits for all ranks, without fastcoll.
  void sync();
  void note(const std::string& key, const std::string& value) { store_->set(key, value); }
  /// Waits for a note.
  std::string read(const std::string& key) const;

 private:
  std::shared_ptr<KeyValueStore> store_;
  int syncs_ = 0;
};

/// Ranks on simulated hosts with a network in memory. Placements: "halves" on two hosts, "two in
/// turns" and "three in turns" (round robin), "one aside" from the rest, or each "alone".
GroupOptions onHosts(const std::string& placement, const Rank& me);

constexpr const char* kPlacements[] = {"halves", "two in turns", "three in turns", "one aside",
                                       "alone"};

/// Runs the body on so many threads of this rank; rethrows the exception of the first thread with
/// one.
void together(int threads, const std::function<void(int)>& body);

using Body = std::function<void(Rank&)>;
/// Runs the body on every rank, as threads of this process or as forked processes. Throws if one
/// fails. If a process is killed on purpose, `dies` is its rank.
void runAsThreads(int ranks, const Body& body);
void runAsProcesses(int ranks, const Body& body, int dies = -1);

/// Ends the program with the test's name if the next call does not come within `seconds`.
void watch(const std::string& name, int seconds);

// --- collectives with a known result ------------------------------------------------------------

constexpr Collective kCollectives[] = {
    Collective::AllReduce,     Collective::Broadcast, Collective::Reduce,
    Collective::AllGather,     Collective::Gather,    Collective::Scatter,
    Collective::ReduceScatter, Collective::AllToAll,  Collective::Barrier};

struct Plan {
  Collective collective = Collective::Barrier;
  DType dtype = DType::Float32;
  ReduceOp op = ReduceOp::None;
  int root = -1;
  std::size_t count = 0;  // elements of the message, or of a rank's largest one if they differ
  bool uneven = false;    // all_gather, all_to_all: the ranks' messages differ
  bool inPlace = false;
  bool spans = false;     // messages in several pieces
  bool narrow = false;    // float32 that travels as bfloat16
  bool measured = false;  // the squares of the result are summed
  std::uint64_t seed = 0;
};
std::string describe(const Plan& plan);
/// A plan of the given collective and size; the rest is random.
Plan draw(Random& random, Collective collective, std::size_t count, int ranks);
Plan drawAny(Random& random, int ranks, std::size_t most);

class Job : public Task {
 public:
  /// `shared`: this rank's input is in this arena, where peers can read it.
  Job(const Plan& plan, int rank, int ranks, Milliseconds timeout = Milliseconds(60000),
      std::shared_ptr<Arena> shared = nullptr);
  ~Job() override;
  /// Throws the fault, or an error if the result is wrong.
  void check() const;
  /// Throws if the result is wrong.
  void verify() const;

  std::function<void()> beforeTransfer;
  void run(CpuEngine& engine) override {
    if (beforeTransfer) beforeTransfer();
    Task::run(engine);
  }

 private:
  struct Expected {
    const std::uint8_t* at;
    std::size_t count;
    std::function<double(std::size_t)> value;
  };
  std::uint8_t* buffer(std::size_t bytes);
  std::uint8_t* given(std::size_t bytes);
  void verifySquares() const;
  /// `whole`: travels in its own dtype, even if the plan is narrow.
  Message message(std::uint8_t* data, std::size_t bytes, bool whole = false);
  Message source(int from, int to, std::size_t count, std::uint8_t* data = nullptr);
  Message sink(std::size_t count, std::function<double(std::size_t)> value,
               std::uint8_t* data = nullptr);

  const Plan plan_;
  const int rank_;
  const int ranks_;
  Random random_;  // differs from rank to rank
  std::vector<std::unique_ptr<std::uint8_t[]>> buffers_;
  std::shared_ptr<Arena> arena_;
  std::uint64_t extent_ = 0;
  std::size_t used_ = 0;
  std::vector<Expected> expected_;
  double squares_ = 0;
};
using JobRef = std::shared_ptr<Job>;

/// An all_reduce of `count` float32.
Plan sum(std::size_t count);
JobRef job(const Rank& me, const Plan& plan, int timeoutMs = 30000);

/// A thread that aborts the engine after so many microseconds.
std::jthread abortAfter(const Engine& engine, std::size_t micros, const char* why);

/// Waits for a submitted job and checks its result.
void finish(CpuEngine& engine, const Job& job);
/// Runs the plan and checks its result.
void runChecked(const Rank& me, CpuEngine& engine, const Plan& plan);

// --- expectations of faults ---------------------------------------------------------------------

/// Runs the body, which must throw an Error whose text contains one of `texts`.
std::string requireFault(const std::vector<std::string>& texts, const std::function<void()>& body);

/// Open descriptors and threads of this process.
int openDescriptors();
int runningThreads();

inline std::size_t drawBelow(Random& random, std::size_t end) {
  return static_cast<std::size_t>(random() % end);
}
inline bool chance(Random& random, int oneIn) {
  return random() % static_cast<unsigned>(oneIn) == 0;
}
/// Sleeps up to so many microseconds, or not at all.
void loiter(Random& random, int mostMicros);

// --- the tests: stress_<name>.cpp ---------------------------------------------------------------

struct Test {
  const char* name;
  Body body;
  std::vector<int> ranks;
  bool processes = true;  // may run as processes too
  int dies = -1;          // the rank that ends by a signal
  bool threads = true;    // may run as threads
};
std::vector<Test> collectiveTests();
std::vector<Test> pointToPointTests();
std::vector<Test> groupTests();
std::vector<Test> hostTests();
std::vector<Test> faultTests();
std::vector<Test> endingTests();
std::vector<Test> digestTests();

/// Factor of the tests' repetitions; --effort.
extern int effort;
/// Repetitions that differ by chance alone: a third of them under a sanitizer. It slows each of
/// them 5 to 15 times, and reports an error that did no harm.
int often(int repetitions);

}  // namespace stress
