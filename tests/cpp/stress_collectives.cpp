// Every collective over sizes at the edges of slots and segments, and random sequences of them.
#include <unistd.h>

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <thread>

#include "base/cores.hpp"
#include "base/worker_pool.hpp"
#include "cpu/algorithms/algorithm.hpp"
#include "stress_harness.hpp"

namespace stress {
namespace {

/// Counts around the edges that matter for messages with elements of `element` bytes.
std::vector<std::size_t> edges(std::size_t element, std::size_t segment, int ranks) {
  const auto n = static_cast<std::size_t>(ranks);
  std::vector<std::size_t> counts = {0, 1, 7};
  const std::size_t bytes[] = {ControlBlock::kSmallSegmentBytes,
                               ControlBlock::kSmallSegmentBytes / n,
                               std::min(segment, 2 * TuningTable{}.oneShotBytes / n),
                               segment,
                               segment / n,
                               segment * 18,
                               segment * 35 + 100};
  for (const std::size_t size : bytes) {
    const std::size_t count = size / element;
    for (const std::size_t c : {count - 1, count, count + 1}) counts.push_back(c);
  }
  return counts;
}

void grid(Rank& me) {
  Random random(1);
  for (const std::size_t segment : {std::size_t{4096}, std::size_t{6016}}) {
    GroupOptions options;
    options.ringBytes = 4 * segment;
    options.digest = segment == 4096 ? "off" : "sum";
    const Engine engine = me.group(concat("grid", segment), options);
    for (const Collective collective : kCollectives) {
      for (const std::size_t index :
           {0, 3, 6, 9, 12, 15, 18, 21, 1, 2, 4, 5, 7, 8, 10, 11, 13, 14, 16, 17, 19, 20, 22, 23}) {
        for (int repeat = 0; repeat < effort; ++repeat) {
          Plan plan = draw(random, collective, 0, me.size);
          const auto counts = edges(elementSize(plan.dtype), segment, me.size);
          plan.count = collective == Collective::Barrier ? 0 : counts[index % counts.size()];
          runChecked(me, *engine, plan);
        }
      }
    }
    engine->shutdown();
  }
}

/// float32 in several pieces; also as bfloat16, with the sum of squares.
void sums(const Rank& me, CpuEngine& engine) {
  for (const Collective collective : {Collective::AllReduce, Collective::ReduceScatter}) {
    for (const bool narrow : {false, true}) {
      Plan plan = sum(400001);
      plan.collective = collective;
      plan.spans = true;
      plan.narrow = plan.measured = narrow;
      runChecked(me, engine, plan);
    }
  }
}

/// Segments of the default sizes, because other tests use small ones; on several threads of a rank.
Body largeSegments(int threads) {
  return [threads](Rank& me) {
    Random random(2);
    GroupOptions options;
    options.ringBytes = EngineConfig{}.settings.ringBytes;
    options.threads = threads;
    const Engine engine = me.group("large", options);
    for (const Collective collective : kCollectives) {
      Plan plan = draw(random, collective, 2200001, me.size);
      plan.dtype = DType::UInt8;
      plan.narrow = plan.measured = false;
      if (plan.op != ReduceOp::None) plan.op = ReduceOp::Sum;
      runChecked(me, *engine, plan);
    }
    sums(me, *engine);
    engine->shutdown();
  };
}

/// On several threads of each rank, the leaders among them.
void largeSegmentsOnHosts(Rank& me) {
  GroupOptions options;
  options.ringBytes = EngineConfig{}.settings.ringBytes;
  options.threads = 3;
  options.hostId = std::to_string(2 * me.rank / me.size);
  options.sharedMemory = "auto";
  const Engine engine = me.group("large on hosts", options);
  sums(me, *engine);
  engine->shutdown();
}

/// Each byte is in one chunk, whatever the number of threads, which changes from job to job; with
/// threads that come and go, and jobs without any.
void chunks(Rank&) {
  Random random(4);
  const CoreSet allowed = allowedCores();
  const auto caller = std::this_thread::get_id();
  REQUIRE(coresOfNode(presentNode()).any(), "no core has this node");
  const auto helpers = std::make_shared<Helpers>();
  for (int round = 0; round < often(600); ++round) {
    const Helpers::Lent lent(*helpers, 1 + round % 5, round % 3 != 0);
    std::vector<std::uint8_t> times(drawBelow(random, 300000));
    Helpers::inChunks(times.size(), [&](std::size_t begin, std::size_t end) {
      const bool bound = (allowedCores() & ~coresOfNode(presentNode())).none();
      REQUIRE(bound || std::this_thread::get_id() == caller, "not bound to a node");
      REQUIRE(begin % Helpers::kUnit == 0, "a chunk begins inside a unit");
      for (std::size_t i = begin; i < end; ++i) ++times[i];
    });
    const auto once = [](std::uint8_t count) { return count == 1; };
    REQUIRE(std::ranges::all_of(times, once), "a byte is in no chunk, or in two");
    if (round % 50 == 0) std::this_thread::sleep_for(Milliseconds(25));  // the helpers have left
    if (round % 7 == 0) loiter(random, 200);                             // they sleep
  }
  helpers->close();
  const Helpers::Lent lent(*helpers, 3, true);
  bool ran = false;
  Helpers::inChunks(200000,
                    [&](std::size_t begin, std::size_t end) { ran = end - begin == 200000; });
  REQUIRE(ran, "closed helpers were asked");
  REQUIRE(allowedCores() == allowed, "the caller was bound");
}

/// A thread is bound to the cores that it may use of those given, or stays where it may run.
void bound(Rank&) {
  REQUIRE(coresOfList("0-3,8,10-11\n") == CoreSet(0b1101'0000'1111), "of a list");
  REQUIRE(coresOfList("").none() && coresOfList("5000").none(), "of no list");
  const CoreSet allowed = allowedCores();
  CoreSet one;
  one.set(allowed._Find_first());
  {
    const BoundTo near(one | (CoreSet(1) << 1000));
    REQUIRE(allowedCores() == one, "not bound");
    const BoundTo nowhere(CoreSet(1) << 1000);
    REQUIRE(allowedCores() == one, "bound to cores that it may not use");
  }
  REQUIRE(allowedCores() == allowed, "still bound");
}

/// The last-level cache of cores is that of the last entry of the first one; ranks share it if each
/// may run on its cores only.
void caches(Rank&) {
  namespace fs = std::filesystem;
  const fs::path system = fs::temp_directory_path() / concat("caches", ::getpid());
  const auto add = [&](int core, int index, const char* list) {
    const fs::path entry = system / concat("cpu", core, "/cache/index", index);
    fs::create_directories(entry);
    std::ofstream(entry / "shared_cpu_list") << list << '\n';
  };
  for (const int core : {0, 1, 2, 3}) {
    add(core, 0, "9");  // the first level
    add(core, 1, core < 2 ? "0-1" : "2-3");
  }
  const auto of = [&](int cores) { return coresOfCache(CoreSet(cores), system); };
  const CoreSet lower(0b0011), upper(0b1100);
  const bool read = of(0b0001) == lower && of(0b0011) == lower && of(0b1000) == upper;
  const bool several = of(0b0110).none() && of(0b1111).none();
  const bool unknown = of(0b10000).all() && of(0).all();
  fs::remove_all(system);
  REQUIRE(read && several && unknown, read, several, unknown);
  REQUIRE(shareCache({0b0001, 0b0010}, {lower, lower}), "of one cache");
  REQUIRE(!shareCache({0b0001, 0b0100}, {lower, upper}), "of two caches");
  REQUIRE(!shareCache({0b0001, 0b0110}, {lower, CoreSet()}), "a rank of several caches");
  REQUIRE(shareCache({0b0001, 0b0100}, {~CoreSet(), ~CoreSet()}), "of unknown caches");
}

/// The inputs are in shared memory, on all ranks or on all but one; collectives through the ring
/// come in between. The memory is freed at once, so a late reader would be detected.
void direct(Rank& me) {
  Random random(3);
  GroupOptions options;
  options.tuning.directBytes = options.tuning.directAllReduceBytes = 100;
  options.digest = "all";
  const Engine engine = me.group("direct", options);
  runChecked(me, *engine, Plan{});  // makes the process's arena
  for (int i = 0; i < often(300); ++i) {
    Plan plan = drawAny(random, me.size, 30000);
    plan.spans = false;
    const auto odd = static_cast<int>(drawBelow(random, 3 * static_cast<std::size_t>(me.size)));
    const auto arena = odd == me.rank ? nullptr : engine->process()->arena();
    const auto job = std::make_shared<Job>(plan, me.rank, me.size, Milliseconds(60000), arena);
    engine->runInline(job);
    job->verify();
  }
  engine->shutdown();
}

/// Synchronous and asynchronous collectives in the same order on all ranks, awaited in any order.
void randomSequence(Rank& me, const std::string& name, std::uint64_t seed, int steps,
                    std::size_t most, GroupOptions options = {}) {
  if (seed % 2 == 1) options.digest = "all";
  Random shared(seed);
  Random own(seed * 101 + static_cast<unsigned>(me.rank));
  const Engine engine = me.group(name, options);
  std::vector<JobRef> open;
  const auto waitOne = [&] {
    const std::size_t at = drawBelow(own, open.size());
    const JobRef job = open[at];
    open.erase(open.begin() + static_cast<std::ptrdiff_t>(at));
    while (chance(own, 3)) engine->waitUntil(*job->completion, Clock::now() + Milliseconds(1));
    finish(*engine, *job);
  };
  for (int i = 0; i < steps; ++i) {
    const Plan plan = drawAny(shared, me.size, most);
    const auto job = std::make_shared<Job>(plan, me.rank, me.size);
    if (chance(own, 3)) {
      engine->runInline(job);
      job->verify();
    } else {
      engine->submit(job);
      open.push_back(job);
    }
    if (chance(own, 8)) loiter(own, 500);
    while (!open.empty() && (open.size() > 8 || chance(own, 3))) waitOne();
  }
  while (!open.empty()) waitOne();
  engine->shutdown();
}

void randomCollectives(Rank& me) {
  for (int round = 0; round < 2; ++round) {
    randomSequence(me, concat("random", round), 10u + static_cast<unsigned>(round), often(150),
                   12000);
  }
}

Body randomSpinning(int micros) {
  return [micros](Rank& me) {
    GroupOptions options;
    options.spinMicros = micros;
    randomSequence(me, "spinning", 77, often(micros == 0 ? 200 : 100), 4000, options);
  };
}

void randomOnHosts(Rank& me) {
  for (const std::string placement : kPlacements) {
    randomSequence(me, "order " + placement, 7, often(100), 20000, onHosts(placement, me));
  }
}

/// A callback waits for a later collective of its own group.
void callbacks(Rank& me) {
  struct Calling : Completion {
    bool callsBack() override { return true; }
    void complete(std::exception_ptr ended) noexcept override {
      Completion::complete(ended);
      then();
    }
    std::function<void()> then;
  };
  Random shared(6);
  const Engine engine = me.group("callbacks");
  for (int i = 0; i < often(60); ++i) {
    const auto first = std::make_shared<Job>(drawAny(shared, me.size, 300), me.rank, me.size);
    const auto second = std::make_shared<Job>(drawAny(shared, me.size, 300), me.rank, me.size);
    const auto calling = std::make_shared<Calling>();
    calling->then = [&engine, second] { engine->wait(*second->completion); };
    first->completion = calling;
    engine->submit(first);
    engine->submit(second);
    if (i % 2 == 0) engine->waitUntil(*second->completion, Clock::now() + Milliseconds(60000));
    engine->wait(*first->completion);
    first->check();
    second->check();
  }
}

/// Far more asynchronous collectives than in practice, awaited from the last to the first.
void manyOutstanding(Rank& me) {
  Random shared(5);
  const Engine engine = me.group("outstanding");
  std::vector<JobRef> open;
  for (int i = 0; i < 100; ++i) {
    open.push_back(std::make_shared<Job>(drawAny(shared, me.size, 300), me.rank, me.size));
    engine->submit(open.back());
  }
  std::reverse(open.begin(), open.end());
  for (const auto& job : open) finish(*engine, *job);
}

}  // namespace

std::vector<Test> collectiveTests() {
  return {{"grid", grid, {2, 3, 4, 5}},
          {"large segments", largeSegments(1), {2}},
          {"large segments on three threads", largeSegments(3), {2, 3}},
          {"hosts: large segments on three threads", largeSegmentsOnHosts, {2, 3}, false},
          {"chunks of helpers", chunks, {1}},
          {"threads bound to cores", bound, {1}},
          {"caches of cores", caches, {1}},
          {"direct reads", direct, {2, 3, 4}},
          {"random collectives", randomCollectives, {2, 3, 5}},
          {"random collectives, sleeping at once", randomSpinning(0), {4}},
          {"random collectives, spinning", randomSpinning(300), {2, 3}},
          {"many outstanding", manyOutstanding, {2}},
          {"hosts: random collectives", randomOnHosts, {3, 4, 6}, false},
          {"more ranks than cores", randomCollectives, {8}},
          {"callbacks that wait", callbacks, {2, 3}, false}};
}

}  // namespace stress
