// Plans: collectives that kernels serve, prepared once and repeated when such a call comes again.
//
// A plan depends on the kind of a call: collectives, dtypes, options, the stream, and for each
// tensor whether it is aligned and whether it is in place. Lists also depend on their sizes. A
// single tensor depends on its size class, unless the plan is `ofCount`. Each run gets the tensors'
// addresses. Launches for lists read addresses from tables on the device, which are kept too. The
// least recently used plans and tables are dropped first; those that a user's graph has captured
// stay.
#pragma once

#include <c10/core/Event.h>

#include <atomic>
#include <list>
#include <memory>
#include <mutex>
#include <string>
#include <unordered_map>
#include <utility>
#include <variant>
#include <vector>

#include "cuda/capture.hpp"
#include "cuda/kernel.hpp"
#include "cuda/nccl.hpp"
#include "torch/device_engine.hpp"

namespace fastcoll {

/// Calls of NCCL between launches, as one group.
struct PlannedCalls {
  std::vector<DeviceRequest> requests;
  bool fromSource = false;  // the inputs' addresses are offsets in the call's input
  bool toOut = false;       // the results' addresses are offsets in the call's result
};

/// Addresses of a call's input and result, or of tables with all its tensors' addresses.
struct Place {
  std::uintptr_t source = 0;
  std::uintptr_t out = 0;
  std::int64_t count = 0;  // elements of a single tensor
};

/// What a plan depends on: the requests, of one kind, and where they run. Code that kernels of a
/// kind need depends on less, and addresses in tables on more; see Plans.
struct PlanKey {
  /// Of all requests, which have none here; `squares` is 0 or 1.
  std::shared_ptr<const AllReduceOptions> options;
  std::vector<DeviceRequest> requests;
  std::uintptr_t stream = 0;
  std::uint64_t capture = 0;  // a graph shares no workspace with other graphs and calls outside it

  bool operator==(const PlanKey& other) const;
};

struct PlanKeyHash {
  std::size_t operator()(const PlanKey& key) const;
};

/// One algorithm's part of a plan.
struct PlanPart {
  std::string algorithm;
  std::vector<std::size_t> tasks;  // the caller's collectives, by index
  std::vector<std::variant<Launch, PlannedCalls>> steps;
  bool tables = false;  // the launches read the tensors' addresses from tables
  std::shared_ptr<void> held;
};

struct Plan {
  std::vector<PlanPart> parts;
  std::vector<std::size_t> left;  // collectives that NCCL serves unchanged
  bool usesPeers = false;         // a launch works on the peers' memory
  bool ofCount = false;           // serves this number of elements only

  std::size_t launches() const;
  bool readsTables() const;
  /// Puts the steps on a stream, or into the graph that captures it. `places`: of each part;
  /// `squares`: as in the call's options.
  void run(const std::vector<Place>& places, std::uintptr_t squares, NcclCalls& nccl,
           void* stream) const;
};

/// The places of a plan's parts for certain tensors, with the tables that they refer to.
struct PlacedPlan {
  std::shared_ptr<const Plan> plan;
  std::vector<Place> places;
  std::vector<std::shared_ptr<void>> tables;
};

/// The most recently used values, by key.
template <typename Value>
class Recent {
 public:
  explicit Recent(std::size_t most) : most_(most) {}
  /// Returns nullptr if there is none. A value found is then the last to be dropped.
  Value* find(const PlanKey& key) {
    const auto found = where_.find(key);
    if (found == where_.end()) return nullptr;
    values_.splice(values_.end(), values_, found->second);
    return &found->second->second;
  }
  using List = std::list<std::pair<PlanKey, Value>>;
  /// Returns what was dropped for it.
  List add(const PlanKey& key, Value value) {
    List dropped;
    if (const auto found = where_.find(key); found != where_.end()) {
      dropped.splice(dropped.end(), values_, found->second);
    } else if (values_.size() >= most_) {
      where_.erase(values_.front().first);
      dropped.splice(dropped.end(), values_, values_.begin());
    }
    where_[key] = values_.insert(values_.end(), {key, std::move(value)});
    return dropped;
  }
  template <typename Condition>
  List takeIf(const Condition& condition) {
    List taken;
    for (auto it = values_.begin(); it != values_.end();) {
      const auto at = it++;
      if (!condition(at->second)) continue;
      where_.erase(at->first);
      taken.splice(taken.end(), values_, at);
    }
    return taken;
  }
  List takeAll() {
    where_.clear();
    return std::exchange(values_, {});
  }
  const List& values() const { return values_; }

 private:
  const std::size_t most_;
  List values_;  // the most recently used last
  std::unordered_map<PlanKey, typename List::iterator, PlanKeyHash> where_;
};

/// The plans of one group on one device. From any thread, but one thread at a time runs plans.
class Plans {
 public:
  /// `kernelBytes`: size of the largest all-reduce without options that a kernel may serve; 0: NCCL
  /// serves all of them; the largest int: an algorithm, or the order of sums, is forced. `limits`:
  /// sizes as they travel, in bytes, at which the choice of the algorithm changes.
  Plans(std::int64_t kernelBytes, std::vector<std::int64_t> limits);

  static constexpr std::uintptr_t kAlignment = 16;  // of 128-bit loads

  const std::int64_t kernelBytes;
  /// Set by any thread: the plans wait for the peers with the timeout of before.
  std::atomic<bool> outdated{false};

  using Indices = std::vector<std::size_t>;
  /// The requests that kernels may serve: all-reduces with the same options together. If an
  /// algorithm or the order of sums is forced, also each reduce-scatter, all-gather and reduce by
  /// itself, which may be refused.
  std::vector<Indices> forKernels(const std::vector<DeviceRequest>& requests) const;
  /// Those of the requests, by all that decides on the choice and on a kernel's code.
  PlanKey kindOf(const std::vector<DeviceRequest>& requests, const Indices& those) const;
  /// Adds to a kind what a plan depends on.
  PlanKey keyOf(PlanKey kind, const std::vector<DeviceRequest>& requests, const Indices& those,
                std::uintptr_t stream, std::uint64_t capture) const;
  /// The key with all of the requests.
  static PlanKey exactKey(const std::vector<DeviceRequest>& requests, const Indices& those,
                          std::uintptr_t stream, std::uint64_t capture);

  /// Whether kernels serve such calls, once it is known.
  std::optional<bool> served(const PlanKey& kind) const;
  void note(const PlanKey& kind, bool served);

  /// The plan for such calls; nullptr: none yet.
  std::shared_ptr<const Plan> find(const PlanKey& key, std::int64_t count);
  /// The plan with tables of addresses, by exactKey().
  std::shared_ptr<const PlacedPlan> findPlaced(const PlanKey& exact);
  void add(const PlanKey& key, std::int64_t count, std::shared_ptr<const Plan> plan);
  void addPlaced(const PlanKey& exact, std::shared_ptr<const PlacedPlan> placed);
  /// Keeps what a user's graph has captured: the memory that its launches read must live as long.
  void pin(const std::shared_ptr<const PlacedPlan>& captured, const Capture& capture);
  /// Drops the plans of graphs that were destroyed.
  void release();
  /// Makes `stream` wait for the last launch with peers, if that is on another stream: the kernels
  /// of a group rely on running one after the other. Captured work does not wait for work outside
  /// its graph: the user decides when a graph runs.
  void follow(const c10::Stream& stream, const Capture& capture);
  /// Notes a launch with peers, right behind it.
  void launched(const c10::Stream& stream, const Capture& capture);

  /// Drops the plans and tables that no graph has captured.
  void forget();
  /// How often that was: what was found before is dropped too.
  std::uint64_t forgotten() const { return forgotten_.load(std::memory_order_relaxed); }
  /// Drops all of them.
  void clear();

  std::size_t built() const;
  std::vector<std::shared_ptr<const Plan>> plans() const;
  std::size_t placed() const;
  std::vector<std::shared_ptr<const Plan>> pinned() const;

 private:
  const std::vector<std::int64_t> limits_;
  mutable std::mutex mutex_;  // not held while a plan is destroyed, which may take the GIL
  std::unordered_map<PlanKey, bool, PlanKeyHash> served_;
  Recent<std::shared_ptr<const Plan>> plans_;  // nullptr: such calls have a plan for each count
  Recent<std::shared_ptr<const PlacedPlan>> placed_;
  struct Pinned {
    std::shared_ptr<const PlacedPlan> placed;
    std::shared_ptr<std::atomic<bool>> over;  // the graph is destroyed
  };
  std::vector<Pinned> pinned_;
  std::size_t built_ = 0;
  std::atomic<std::uint64_t> forgotten_{0};
  // The last launches with peers. Captured and immediate ones do not order each other.
  struct Last {
    c10::Stream stream;
    std::uint64_t capture;
    c10::Event end;
  };
  std::optional<Last> last_[2];
};

}  // namespace fastcoll
