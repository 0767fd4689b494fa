#include "cuda/plans.hpp"

#include <c10/util/hash.h>

#include <algorithm>
#include <iterator>
#include <limits>

namespace fastcoll {
namespace {

// Several times the buckets and lists of a model.
constexpr std::size_t kMostPlans = 256;
constexpr std::size_t kMostPlaced = 1024;
constexpr std::size_t kMostKinds = 4096;

/// The size of an all-reduce's elements as they travel.
std::int64_t wireSize(const DeviceRequest& request) {
  const auto size = static_cast<std::int64_t>(elementSize(request.dtype));
  if (request.options == nullptr || !request.options->wire || !isFloating(request.dtype)) {
    return size;
  }
  return std::min(size, static_cast<std::int64_t>(elementSize(*request.options->wire)));
}

}  // namespace

// --- plans ---------------------------------------------------------------------------------------

std::size_t Plan::launches() const {
  std::size_t all = 0;
  for (const PlanPart& part : parts) all += part.steps.size();
  return all;
}

bool Plan::readsTables() const {
  return std::any_of(parts.begin(), parts.end(), [](const PlanPart& part) { return part.tables; });
}

void Plan::run(const std::vector<Place>& places, std::uintptr_t squares, NcclCalls& nccl,
               void* stream) const {
  for (std::size_t i = 0; i < parts.size(); ++i) {
    const Place& place = places[i];
    for (const auto& step : parts[i].steps) {
      if (const auto* launch = std::get_if<Launch>(&step)) {
        launch->run(stream, place.source, place.out, place.count, squares);
        continue;
      }
      const auto& planned = std::get<PlannedCalls>(step);
      if (!planned.fromSource && !planned.toOut) {
        nccl.issue(planned.requests, reinterpret_cast<std::uintptr_t>(stream));
        continue;
      }
      std::vector<DeviceRequest> requests = planned.requests;
      for (DeviceRequest& request : requests) {
        if (planned.fromSource && request.in.count != 0) request.in.address += place.source;
        if (planned.toOut && request.out.count != 0) request.out.address += place.out;
      }
      nccl.issue(requests, reinterpret_cast<std::uintptr_t>(stream));
    }
  }
}

// --- kinds ---------------------------------------------------------------------------------------

Plans::Plans(std::int64_t kernelBytes, std::vector<std::int64_t> limits)
    : kernelBytes(kernelBytes),
      limits_(std::move(limits)),
      plans_(kMostPlans),
      placed_(kMostPlaced) {}

std::vector<Plans::Indices> Plans::forKernels(const std::vector<DeviceRequest>& requests) const {
  std::vector<Indices> together;
  for (std::size_t i = 0; i < requests.size(); ++i) {
    const DeviceRequest& one = requests[i];
    if (one.collective == Collective::ReduceScatter || one.collective == Collective::AllGather ||
        one.collective == Collective::Reduce) {
      if (kernelBytes == std::numeric_limits<std::int64_t>::max()) together.push_back({i});
      continue;
    }
    if (one.collective != Collective::AllReduce) continue;
    if (kernelBytes == 0 && one.options == nullptr) continue;
    const auto like = std::find_if(together.begin(), together.end(), [&](const Indices& those) {
      if (requests[those[0]].collective != Collective::AllReduce) return false;
      const auto& options = requests[those[0]].options;
      if (options == nullptr || one.options == nullptr) return options == one.options;
      return *options == *one.options;
    });
    like != together.end() ? like->push_back(i) : together.push_back({i});
  }
  const auto tooLarge = [&](const Indices& those) {
    const DeviceRequest& one = requests[those[0]];
    const auto bytes = one.in.count * static_cast<std::int64_t>(elementSize(one.dtype));
    return those.size() == 1 && one.options == nullptr && bytes > kernelBytes;
  };
  together.erase(std::remove_if(together.begin(), together.end(), tooLarge), together.end());
  return together;
}

bool PlanKey::operator==(const PlanKey& other) const {
  const bool sameOptions =
      options == other.options ||
      (options != nullptr && other.options != nullptr && *options == *other.options);
  return sameOptions && stream == other.stream && capture == other.capture &&
         requests == other.requests;
}

std::size_t PlanKeyHash::operator()(const PlanKey& key) const {
  std::size_t hash = c10::get_hash(key.stream, key.capture);
  for (const DeviceRequest& one : key.requests) {
    hash = c10::hash_combine(
        hash, c10::get_hash(static_cast<int>(one.collective), static_cast<int>(one.dtype),
                            one.in.address, one.out.address, one.in.count, one.out.count));
  }
  return hash;
}

PlanKey Plans::kindOf(const std::vector<DeviceRequest>& requests, const Indices& those) const {
  PlanKey kind;
  kind.options = requests[those[0]].options;
  if (kind.options != nullptr && kind.options->squares != 0) {
    AllReduceOptions measures = *kind.options;
    measures.squares = 1;
    kind.options = std::make_shared<AllReduceOptions>(std::move(measures));
  }
  const bool forced = kernelBytes == std::numeric_limits<std::int64_t>::max() ||
                      (kind.options != nullptr && !kind.options->algorithm.empty());
  for (const std::size_t i : those) {
    DeviceRequest one = requests[i];
    one.options = nullptr;
    if (one.op != ReduceOp::PreMulSum) one.factor = 1.0;
    one.factorOnDevice = one.factorOnDevice != 0;
    // A forced algorithm may have other kernels for such addresses.
    one.in.address = forced ? (one.in.address | one.out.address) % kAlignment : 0;
    one.out.address = 0;
    one.out.count = 0;
    if (those.size() == 1) {  // the size class
      const auto bytes = one.in.count * wireSize(requests[i]);
      one.out.count = std::lower_bound(limits_.begin(), limits_.end(), bytes) - limits_.begin();
      if (!forced) one.in.count = 0;
    }
    kind.requests.push_back(std::move(one));
  }
  return kind;
}

PlanKey Plans::keyOf(PlanKey kind, const std::vector<DeviceRequest>& requests, const Indices& those,
                     std::uintptr_t stream, std::uint64_t capture) const {
  kind.stream = stream;
  kind.capture = capture;
  for (std::size_t i = 0; i < those.size(); ++i) {
    const DeviceRequest& one = requests[those[i]];
    kind.requests[i].in.address = (one.in.address | one.out.address) % kAlignment;
    kind.requests[i].out.address = one.in.address == one.out.address;
  }
  return kind;
}

PlanKey Plans::exactKey(const std::vector<DeviceRequest>& requests, const Indices& those,
                        std::uintptr_t stream, std::uint64_t capture) {
  PlanKey exact{requests[those[0]].options, {}, stream, capture};
  for (const std::size_t i : those) {
    exact.requests.push_back(requests[i]);
    exact.requests.back().options = nullptr;
  }
  return exact;
}

std::optional<bool> Plans::served(const PlanKey& kind) const {
  const std::lock_guard<std::mutex> lock(mutex_);
  const auto found = served_.find(kind);
  return found == served_.end() ? std::nullopt : std::optional<bool>(found->second);
}

void Plans::note(const PlanKey& kind, bool served) {
  const std::lock_guard<std::mutex> lock(mutex_);
  if (served_.size() >= kMostKinds) served_.clear();
  served_[kind] = served;
}

// --- what is kept --------------------------------------------------------------------------------

namespace {

/// The key of a plan for one number of elements.
PlanKey withCount(PlanKey key, std::int64_t count) {
  key.requests[0].in.count = count;
  return key;
}

}  // namespace

std::shared_ptr<const Plan> Plans::find(const PlanKey& key, std::int64_t count) {
  const std::lock_guard<std::mutex> lock(mutex_);
  const auto* found = plans_.find(key);
  if (found != nullptr && *found == nullptr) found = plans_.find(withCount(key, count));
  return found == nullptr ? nullptr : *found;
}

void Plans::add(const PlanKey& key, std::int64_t count, std::shared_ptr<const Plan> plan) {
  decltype(plans_.takeAll()) dropped;
  const std::lock_guard<std::mutex> lock(mutex_);
  ++built_;
  const PlanKey whole = plan->ofCount ? withCount(key, count) : key;
  if (plan->ofCount) dropped = plans_.add(key, nullptr);
  dropped.splice(dropped.end(), plans_.add(whole, std::move(plan)));
}

std::shared_ptr<const PlacedPlan> Plans::findPlaced(const PlanKey& exact) {
  const std::lock_guard<std::mutex> lock(mutex_);
  const auto* found = placed_.find(exact);
  return found == nullptr ? nullptr : *found;
}

void Plans::addPlaced(const PlanKey& exact, std::shared_ptr<const PlacedPlan> placed) {
  decltype(placed_.takeAll()) dropped;
  const std::lock_guard<std::mutex> lock(mutex_);
  dropped = placed_.add(exact, std::move(placed));
}

void Plans::pin(const std::shared_ptr<const PlacedPlan>& captured, const Capture& capture) {
  const std::lock_guard<std::mutex> lock(mutex_);
  const auto same = [&](const Pinned& known) {
    return known.placed->plan == captured->plan && known.placed->tables == captured->tables;
  };
  if (std::any_of(pinned_.begin(), pinned_.end(), same)) return;
  pinned_.push_back({captured, std::make_shared<std::atomic<bool>>(false)});
  whenDestroyed(capture, pinned_.back().over);
}

void Plans::release() {
  std::vector<Pinned> over;
  decltype(plans_.takeAll()) plans;
  decltype(placed_.takeAll()) placed;
  const std::lock_guard<std::mutex> lock(mutex_);
  const auto kept = std::stable_partition(pinned_.begin(), pinned_.end(),
                                          [](const Pinned& one) { return !one.over->load(); });
  if (kept == pinned_.end()) return;
  std::move(kept, pinned_.end(), std::back_inserter(over));
  pinned_.erase(kept, pinned_.end());
  const auto isOver = [&](const std::shared_ptr<const Plan>& plan) {
    return std::any_of(over.begin(), over.end(),
                       [&](const Pinned& one) { return one.placed->plan == plan; });
  };
  plans = plans_.takeIf(isOver);
  placed = placed_.takeIf([&](const auto& one) { return isOver(one->plan); });
}

void Plans::follow(const c10::Stream& stream, const Capture& capture) {
  const auto& last = last_[capture.id != 0];
  if (last && last->capture == capture.id && last->stream != stream) last->end.block(stream);
}

void Plans::launched(const c10::Stream& stream, const Capture& capture) {
  auto& last = last_[capture.id != 0];
  // An event of another capture belongs to its graph.
  if (!last || last->capture != capture.id) {
    last.emplace(Last{stream, capture.id, c10::Event(stream.device_type())});
  }
  last->stream = stream;
  last->end.record(stream);
}

void Plans::forget() {
  decltype(plans_.takeAll()) plans;
  decltype(placed_.takeAll()) placed;
  const std::lock_guard<std::mutex> lock(mutex_);
  plans = plans_.takeAll();
  placed = placed_.takeAll();
  ++forgotten_;
}

void Plans::clear() {
  forget();
  decltype(pinned_) pinned;
  const std::lock_guard<std::mutex> lock(mutex_);
  pinned.swap(pinned_);
}

std::size_t Plans::built() const {
  const std::lock_guard<std::mutex> lock(mutex_);
  return built_;
}

std::vector<std::shared_ptr<const Plan>> Plans::plans() const {
  const std::lock_guard<std::mutex> lock(mutex_);
  std::vector<std::shared_ptr<const Plan>> all;
  for (const auto& [key, plan] : plans_.values()) {
    if (plan != nullptr) all.push_back(plan);
  }
  return all;
}

std::size_t Plans::placed() const {
  const std::lock_guard<std::mutex> lock(mutex_);
  return placed_.values().size();
}

std::vector<std::shared_ptr<const Plan>> Plans::pinned() const {
  const std::lock_guard<std::mutex> lock(mutex_);
  std::vector<std::shared_ptr<const Plan>> all;
  for (const Pinned& one : pinned_) all.push_back(one.placed->plan);
  return all;
}

}  // namespace fastcoll
