// The life of a group on torch's side: construction, abort, shutdown, split and merge.
#include "process_group.hpp"

#include <torch/csrc/distributed/c10d/PrefixStore.hpp>

#include <algorithm>

#include "base/entry_lock.hpp"
#include "base/weak_registry.hpp"
#include "base/worker_pool.hpp"
#include "network/networks.hpp"
#include "reduce/reduce.hpp"
#include "torch/store_adapter.hpp"

namespace fastcoll {
namespace {

EngineConfig configOf(const Options& options, const std::string& name, int rank, int size) {
  EngineConfig config;
  config.name = name;
  config.rank = rank;
  config.size = size;
  config.settings = options.settings.withEnvironment();
  // Whole pages. A segment, a quarter of the ring, has at least a cache line for each rank.
  std::int64_t& ring = config.settings.ringBytes;
  ring = roundToPage(std::max<std::size_t>(ring, 4 * 64 * size));
  config.tuning = options.tuning.value_or(TuningTable{});
  config.version = FASTCOLL_VERSION;
  const std::string& isa = config.settings.isa;
  if (isa != "auto") setReduceIsa(isa.c_str());
  return config;
}

}  // namespace

ProcessGroupFastcoll::ProcessGroupFastcoll(c10::intrusive_ptr<c10d::Store> store, int rank,
                                           int size, c10::intrusive_ptr<Options> options)
    : c10d::Backend(rank, size),
      store_(std::move(store)),
      options_(std::move(options)),
      name_(options_->group_name.empty() ? "default_pg" : options_->group_name) {
  translated([&] {
    if (size < 1 || rank < 0 || rank >= size) {
      throw Error(ErrorKind::Value, "fastcoll.init [group '", name_,
                  "']: expected a rank from 0 to the world size minus one, got rank ", rank, " of ",
                  size, ". Correct the rank or the world size.");
    }
    EngineConfig config = configOf(*options_, name_, rank, size);
    doors_.emplace(name_, rank, size, config.settings.order == "fixed");
    config.abortHooks = abortHooks_;
    // It holds the store, not the group, because the engine may outlive the group.
    const std::chrono::seconds silence(config.settings.linkSeconds);
    auto network = networkNamed(config.settings.network, {store_, silence});
    engine_ = std::make_shared<CpuEngine>(std::move(config), std::make_unique<StoreAdapter>(store_),
                                          std::move(network));
    registryOf<CpuEngine>().add(engine_);
    // A group fails as one: its CPU engine reports a device's fault to the ranks of this host at
    // once. It does so on another thread, because its abort runs the callbacks of works.
    const auto onFault = [cpu = std::weak_ptr<CpuEngine>(engine_)](ErrorKind kind,
                                                                   const std::string& cause) {
      runOnWorker([cpu, kind, cause] {
        if (const auto engine = cpu.lock()) engine->abort(kind, cause);
      });
    };
    device_.emplace(DeviceGroup{c10::make_intrusive<c10d::PrefixStore>("fastcoll/device", store_),
                                name_, engine_->config().settings, rank, size, options_,
                                c10::DeviceType::CUDA, std::make_shared<HostPeers>(engine_),
                                [hooks = abortHooks_] { hooks->callElsewhere(); }, onFault});
  });
  trace_.emplace(*this, name_, options_, engine_->config().settings, [this] {
    const auto device = device_->made();
    return engine_->faulted() || (device != nullptr && device->faulted());
  });
  init();
}

ProcessGroupFastcoll::~ProcessGroupFastcoll() {
  release_resources();
}

void ProcessGroupFastcoll::release_resources() {
  if (engine_ == nullptr) return;  // the destructor comes second
  beforeWait();
  trace_.reset();
  device_.reset();
  engine_->shutdown();
  // Memory, threads and sockets must not wait for the last weak reference.
  engine_.reset();
  abortHooks_->clear();
  lastMerge_.reset();
  store_.reset();
}

void ProcessGroupFastcoll::shutdownAll() {
  trace::end();
  for (const auto& device : registryOf<DeviceEngine>().all()) device->end();
  for (const auto& engine : registryOf<CpuEngine>().all()) engine->shutdown();
  drainWorkers();
}

c10d::ErrorType ProcessGroupFastcoll::getError() {
  ErrorKind kind = ErrorKind::Backend;
  const auto device = device_->made();
  const bool faulted = engine_->faulted(&kind) || (device != nullptr && device->faulted(&kind));
  if (!faulted) return c10d::ErrorType::SUCCESS;
  return kind == ErrorKind::Timeout ? c10d::ErrorType::TIMEOUT : c10d::ErrorType::COMM_ERROR;
}

void ProcessGroupFastcoll::abort() {
  abortHooks_->call();
  const std::string what = concat("rank ", rank_, " aborted the group");
  const std::string cause = concat(what, kInitAgain);
  if (const auto device = device_->last(what)) device->abort(ErrorKind::Backend, cause);
  engine_->abort(ErrorKind::Backend, cause);
}

void ProcessGroupFastcoll::shutdown() {
  translated([&] {
    if (const auto device = device_->last("the group was destroyed")) {
      try {
        device->shutdown(options_->timeout);
      } catch (...) {
        engine_->shutdown();
        throw;
      }
    }
    engine_->shutdown();
    abortHooks_->clear();
  });
}

c10::intrusive_ptr<c10d::Backend> ProcessGroupFastcoll::split(
    const c10::intrusive_ptr<c10d::Store>& store, const std::vector<int>& ranks,
    const c10::intrusive_ptr<c10d::Backend::Options>& opts) {
  const auto mine = std::ranges::find(ranks, rank_);
  const bool member = mine != ranks.end();
  if (opts == nullptr) {
    throwAsTorch(
        Error(ErrorKind::Type, "fastcoll.split_group: expected options, got None: leave them out"));
  }
  std::lock_guard<std::mutex> lock(splitMutex_);
  // torch calls this once per device type, and one group serves them all.
  if (lastSplit_ == opts->group_name) return lastSplitGroup_->lock();
  auto given = c10::dynamic_intrusive_pointer_cast<Options>(opts);
  if (given == nullptr) {
    // As in new_group, if fastcoll replaces the backend of these options.
    TORCH_WARN("fastcoll: group '", opts->group_name,
               "' is split off without its options of backend '", opts->backend,
               "': it has those of its parent, and the timeout of split_group. Pass "
               "fastcoll.Options to set others.");
    given = c10::make_intrusive<Options>(*options_);
    given->timeout = opts->timeout;
    given->group_name = opts->group_name;
  }
  c10::intrusive_ptr<ProcessGroupFastcoll> group;
  if (member) {
    auto options = c10::make_intrusive<Options>(*given);
    options->global_ranks_in_group.clear();
    const auto& ours = options_->global_ranks_in_group;  // empty for the default group
    for (const int rank : ranks) {
      const std::size_t place = rank;
      options->global_ranks_in_group.push_back(ours.empty() ? static_cast<uint64_t>(rank)
                                                            : ours.at(place));
    }
    group = c10::make_intrusive<ProcessGroupFastcoll>(store, static_cast<int>(mine - ranks.begin()),
                                                      static_cast<int>(ranks.size()), options);
  }
  // Groups of one split share no ranks, so the first rank of each is its color.
  translated([&] { splitDevice(member ? ranks[0] : -1, group.get()); });
  lastSplit_ = opts->group_name;
  lastSplitGroup_.emplace(c10::intrusive_ptr<c10d::Backend>(group));
  if (member) ++splits_;
  return group;
}

/// The ranks come from several groups, numbered in the order in which they came to the store. Their
/// global ranks are not known here.
c10::intrusive_ptr<c10d::Backend> ProcessGroupFastcoll::merge(
    const c10::intrusive_ptr<c10d::Store>& store,
    const c10::intrusive_ptr<c10d::Backend::Options>& opts, const int& rank, const int& size) {
  std::lock_guard<std::mutex> lock(splitMutex_);
  // torch calls this once per device type, as in split().
  if (lastMerge_ == store) return lastMergeGroup_->lock();
  auto options = c10::dynamic_intrusive_pointer_cast<Options>(opts);
  if (options == nullptr) {
    throwAsTorch(Error(ErrorKind::Type, site("merge_remote_group").errorSite(),
                       "expected options of fastcoll, got ",
                       opts == nullptr ? "None" : opts->backend, "'s: leave them out"));
  }
  options->global_ranks_in_group.clear();
  auto group = c10::make_intrusive<ProcessGroupFastcoll>(store, rank, size, std::move(options));
  lastMerge_ = store;
  lastMergeGroup_.emplace(c10::intrusive_ptr<c10d::Backend>(group));
  return group;
}

}  // namespace fastcoll
