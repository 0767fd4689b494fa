#include "process_group.hpp"

#include <ATen/ATen.h>
#include <ATen/record_function.h>
#include <torch/csrc/distributed/c10d/ParamCommsUtils.hpp>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>

#include <algorithm>

#include "call_checks.hpp"
#include "engine/worker_pool.hpp"
#include "network/gloo.hpp"
#include "patient_store.hpp"
#include "reduce/reduce.hpp"
#include "shared_allocator.hpp"
#include "store_adapter.hpp"

namespace fastcoll {
namespace {

ProcessGroupFastcoll::GlooFactory& glooFactory() {
  static auto* factory = new ProcessGroupFastcoll::GlooFactory;
  return *factory;
}

Living<CpuEngine>& livingEngines() {
  static auto* all = new Living<CpuEngine>;  // outlives static destructors
  return *all;
}

EngineConfig configOf(const Options& options, const std::string& name, int rank, int size) {
  const Environment env = Environment::read();
  EngineConfig config;
  config.name = name;
  config.rank = rank;
  config.size = size;
  config.ringBytes = env.ringBytesIsSet ? env.ringBytes : options.ringBytes;
  // Whole pages, and a cache line for each rank in a segment, which is a quarter of the ring.
  config.ringBytes = std::max(config.ringBytes, 4 * 64 * static_cast<std::size_t>(size));
  config.ringBytes = (config.ringBytes + kPage - 1) / kPage * kPage;
  config.tuning = options.tuning.value_or(TuningTable{});
  config.spinMicros = env.spinMicrosIsSet ? env.spinMicros : options.spinMicros;
  config.transport = env.transportIsSet ? env.transport : options.transport;
  config.stores = env.stores;
  config.arenaBytes = env.arenaBytes;
  config.hostId = env.hostId;
  config.version = FASTCOLL_VERSION;
  if (env.isa != "auto") setReduceIsa(env.isa.c_str());
  return config;
}

/// Makes the way to other hosts. It holds the store, not the group: the engine may outlive that.
CpuEngine::MakeNetwork networkOf(const c10::intrusive_ptr<c10d::Store>& store,
                                 const Options& options) {
  const Environment env = Environment::read();
  const std::chrono::seconds silence(env.linkSecondsIsSet ? env.linkSeconds : options.linkSeconds);
  return [store, silence] {
    const auto start = [store]() -> GlooNetwork::MakeBackend {
      return
          [store, make = glooFactory()()](const std::string& name, int rank, Milliseconds timeout) {
            auto prefix = c10::make_intrusive<c10d::PrefixStore>(
                "fastcoll/link/" + name, c10::make_intrusive<PatientStore>(store));
            return make(prefix, rank, 2, timeout);
          };
    };
    return std::make_shared<GlooNetwork>(start, silence);
  };
}

}  // namespace

void ProcessGroupFastcoll::setGlooFactory(GlooFactory factory) {
  glooFactory() = std::move(factory);
}

ProcessGroupFastcoll::ProcessGroupFastcoll(c10::intrusive_ptr<c10d::Store> store, int rank,
                                           int size, c10::intrusive_ptr<Options> options)
    : c10d::Backend(rank, size),
      store_(std::move(store)),
      options_(std::move(options)),
      name_(options_->group_name.empty() ? "default_pg" : options_->group_name) {
  translated([&] {
    if (size < 1 || rank < 0 || rank >= size) {
      throw Error(ErrorKind::Value,
                  concat("fastcoll.init [group '", name_, "']: rank ", rank, " of ", size,
                         " cannot be. Ranks run from 0 to the "
                         "world size minus one."));
    }
    engine_ = std::make_shared<CpuEngine>(configOf(*options_, name_, rank, size),
                                          std::make_unique<StoreAdapter>(store_),
                                          networkOf(store_, *options_));
    livingEngines().add(engine_);
    shareTensors();
  });
  beginTrace();
  init();
}

ProcessGroupFastcoll::~ProcessGroupFastcoll() {
  release_resources();
  if (live().size() <= 1) SharedAllocator::trim();  // this is the last group
}

void ProcessGroupFastcoll::release_resources() {
  endTrace();
  device_.reset();
  engine_->shutdown();
}

std::vector<std::shared_ptr<CpuEngine>> ProcessGroupFastcoll::live() {
  return livingEngines().all();
}

void ProcessGroupFastcoll::shutdownAll() {
  trace::stopWatching();
  for (const auto& device : livingDevices().all()) device->end();
  for (const auto& engine : live()) engine->shutdown();
  drainWorkers();
}

c10d::ErrorType ProcessGroupFastcoll::getError() {
  ErrorKind kind = ErrorKind::Backend;
  const auto device = this->device();
  const bool faulted = engine_->faulted(&kind) || (device != nullptr && device->faulted(&kind));
  if (!faulted) return c10d::ErrorType::SUCCESS;
  return kind == ErrorKind::Timeout ? c10d::ErrorType::TIMEOUT : c10d::ErrorType::COMM_ERROR;
}

std::shared_ptr<DeviceEngine> ProcessGroupFastcoll::lastDeviceEngine(const std::string& why) {
  const std::lock_guard<std::mutex> lock(deviceMutex_);
  if (over_.empty()) over_ = why;
  return device_;
}

void ProcessGroupFastcoll::abort() {
  const std::string cause = concat("rank ", rank_, " aborted the group");
  if (const auto device = lastDeviceEngine(cause)) device->abort(ErrorKind::Backend, cause);
  engine_->abort(ErrorKind::Backend, cause);
}

void ProcessGroupFastcoll::shutdown() {
  translated([&] {
    if (const auto device = lastDeviceEngine("the group was destroyed")) {
      try {
        device->shutdown(options_->timeout);
      } catch (...) {
        engine_->shutdown();
        throw;
      }
    }
    engine_->shutdown();
  });
}

c10::intrusive_ptr<c10d::Backend> ProcessGroupFastcoll::split(
    const c10::intrusive_ptr<c10d::Store>& store, const std::vector<int>& ranks,
    const c10::intrusive_ptr<c10d::Backend::Options>& opts) {
  const auto mine = std::find(ranks.begin(), ranks.end(), rank_);
  const bool member = mine != ranks.end();
  if (opts == nullptr) {
    throwAsTorch(
        Error(ErrorKind::Type, "fastcoll.split_group: expected options, got None: leave them out"));
  }
  std::lock_guard<std::mutex> lock(splitMutex_);
  // torch asks once per device type, and one object serves them all.
  if (lastSplit_ == opts->group_name) return lastSplitGroup_->lock();
  auto given = c10::dynamic_intrusive_pointer_cast<Options>(opts);
  if (given == nullptr) {
    // As new_group does where fastcoll serves in the place of the backend that they are of.
    TORCH_WARN("fastcoll: group '", opts->group_name,
               "' is split off without its options of backend '", opts->backend,
               "': it has those of its parent, and the timeout of split_group.");
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
      const auto place = static_cast<std::size_t>(rank);
      options->global_ranks_in_group.push_back(ours.empty() ? static_cast<uint64_t>(rank)
                                                            : ours.at(place));
    }
    group = c10::make_intrusive<ProcessGroupFastcoll>(store, static_cast<int>(mine - ranks.begin()),
                                                      static_cast<int>(ranks.size()), options);
  }
  // Groups of one split share no ranks, so that the first of each names it.
  translated([&] { splitDevice(member ? ranks[0] : -1, group.get()); });
  lastSplit_ = opts->group_name;
  lastSplitGroup_.emplace(c10::intrusive_ptr<c10d::Backend>(group));
  if (member) ++splits_;
  return group;
}

// --- launching ---------------------------------------------------------------------------------

std::shared_ptr<TensorTask> ProcessGroupFastcoll::newTask(const CallSite& site,
                                                          Collective collective) const {
  auto task = std::make_shared<TensorTask>(site);
  task->request.collective = collective;
  return task;
}

void ProcessGroupFastcoll::setReduction(const CallSite& site, TensorTask& task, Request& request,
                                        const c10d::ReduceOp& op) const {
  const bool onDevice = task.device() && !task.device()->is_cpu();
  switch (op.op_) {
    case c10d::ReduceOp::SUM:
      request.op = ReduceOp::Sum;
      break;
    case c10d::ReduceOp::AVG:
      request.op = ReduceOp::Avg;
      break;
    case c10d::ReduceOp::PRODUCT:
      request.op = ReduceOp::Product;
      break;
    case c10d::ReduceOp::MIN:
      request.op = ReduceOp::Min;
      break;
    case c10d::ReduceOp::MAX:
      request.op = ReduceOp::Max;
      break;
    case c10d::ReduceOp::BAND:
      request.op = ReduceOp::BitAnd;
      break;
    case c10d::ReduceOp::BOR:
      request.op = ReduceOp::BitOr;
      break;
    case c10d::ReduceOp::BXOR:
      request.op = ReduceOp::BitXor;
      break;
    case c10d::ReduceOp::PREMUL_SUM: {
      request.op = ReduceOp::PreMulSum;
      const auto* supplement =
          dynamic_cast<const c10d::NCCLPreMulSumSupplement*>(op.supplement_.get());
      if (supplement == nullptr) {
        throw Error(ErrorKind::Value, site.prefix() +
                                          "expected PREMUL_SUM with a factor, got none. Make the "
                                          "operation with torch's _make_nccl_premul_sum(factor).");
      }
      const at::Tensor& factor = supplement->tensor_factor;
      if (!factor.defined()) {
        request.factor = supplement->double_factor;
      } else if (onDevice && factor.device() == *task.device()) {
        // Read there, by the library, so that nobody waits for it on the host.
        const DType type = partOf(request.dtype);
        if (factor.numel() != 1 || dtypeOf(factor.scalar_type()) != type) {
          throw Error(ErrorKind::Type, concat(site.prefix(), "expected a factor of one element of ",
                                              dtypeName(type), ", got ", factor.numel(), " of ",
                                              dtypeName(dtypeOf(factor.scalar_type()))));
        }
        task.keepAlive(factor);
        request.factorOnDevice = factor.const_data_ptr();
      } else {
        request.factor = factor.item<double>();
      }
      break;
    }
    default:
      throw Error(ErrorKind::Value, site.prefix() +
                                        "expected a reduction of ReduceOp.SUM, AVG, "
                                        "PRODUCT, MIN, MAX, BAND, BOR, BXOR or "
                                        "PREMUL_SUM, got operation " +
                                        std::to_string(static_cast<int>(op.op_)));
  }
  if (onDevice) return;  // the library says what it can reduce
  named(site, [&] { reduceFunction(request.dtype, request.op); });
}

void ProcessGroupFastcoll::checkRank(const CallSite& site, const char* what, int rank) const {
  if (rank < 0 || rank >= size_) {
    throw Error(ErrorKind::Value, concat(site.prefix(), "expected a ", what, " from 0 to ",
                                         size_ - 1, ", got ", rank));
  }
}

int ProcessGroupFastcoll::checkRoot(const CallSite& site, int64_t root, int64_t rootTensor) const {
  checkRank(site, "root rank", static_cast<int>(root));
  if (rootTensor != 0) {
    throw Error(ErrorKind::Value, concat(site.prefix(), "expected a root tensor of 0, got ",
                                         rootTensor, ": each rank gives one tensor"));
  }
  return static_cast<int>(root);
}

void ProcessGroupFastcoll::stopCollecting() {
  std::lock_guard<std::mutex> lock(coalescingMutex_);
  if (coalescingThread_ != std::this_thread::get_id()) return;
  coalescingThread_ = std::thread::id();
  coalesced_.clear();
  for (const DeviceCall& call : batch_) trace::fail(call.trace, "the batch was given up", false);
  batch_.clear();
}

bool ProcessGroupFastcoll::collecting(WorkRef& work) {
  std::lock_guard<std::mutex> lock(coalescingMutex_);
  if (coalescingThread_ != std::this_thread::get_id()) return false;
  if (work != nullptr) coalesced_.push_back(std::move(work));
  work = nullptr;
  return true;
}

namespace {

/// A task whose work is told of its end.
class WorkTask : public Task {
 public:
  WorkTask(std::shared_ptr<TensorTask> inner, c10::intrusive_ptr<CollectiveWork> work)
      : inner_(std::move(inner)), work_(std::move(work)) {
    // What the engine reads; the messages stay with the inner task.
    request.collective = inner_->request.collective;
    request.dtype = inner_->request.dtype;
    request.op = inner_->request.op;
    request.root = inner_->request.root;
    request.count = inner_->request.count;
    request.timeout = inner_->request.timeout;
    draft = inner_->draft;
  }
  void prepare() override { inner_->prepare(); }
  void transfer(const RunOne& runOne) override {
    inner_->request.seq = request.seq;
    inner_->transfer(runOne);
  }
  void finish() override { inner_->finish(); }
  std::shared_ptr<void> memory() override { return inner_; }
  void complete(std::exception_ptr fault) noexcept override {
    inner_.reset();  // lets go of the tensors before anybody is told
    std::exchange(work_, nullptr)->markDone(fault);
  }
  bool callsBack() override { return work_->callsBack(); }

 private:
  std::shared_ptr<TensorTask> inner_;
  c10::intrusive_ptr<CollectiveWork> work_;
};

}  // namespace

ProcessGroupFastcoll::WorkRef ProcessGroupFastcoll::launch(std::shared_ptr<TensorTask> task,
                                                           Call call) {
  task->countsChanges = countsAllChanges_ || task->countsChangesInStock(call.type);
  if (task->device() && !task->device()->is_cpu()) {
    return launchOnDevice(std::move(task), std::move(call));
  }
  task->request.timeout = timeoutOr(call.timeout);
  trace::Record draft;
  describe(draft, *task, call);
  task->draft = draft.group == 0 ? nullptr : &draft;
  const bool profiled = at::hasCallbacks();
  WorkRef none;
  const bool coalescing = collecting(none);
  if (!call.async && !profiled && !coalescing) {
    engine_->runInline(task);
    return nullptr;
  }
  if (profiled) {
    recordParameters(call, collectiveName(task->request.collective), engine_->sequence() + 1,
                     false);
  }
  auto work = c10::make_intrusive<CollectiveWork>(rank_, call.type, call.title,
                                                  std::optional<Tensors>(std::move(call.inputs)),
                                                  std::move(call.outputs), 0);
  auto tracked = std::make_shared<WorkTask>(std::move(task), work);
  if (!call.async && !coalescing) {
    // Inline, but the profiler sees the span of a work.
    try {
      engine_->runInline(tracked);
    } catch (...) {
      tracked->complete(std::current_exception());
      throw;
    }
    work->setSequence(tracked->request.seq);
    work->attach(engine_, tracked);
    tracked->complete(nullptr);
    return work;
  }
  work->attach(engine_, tracked);
  try {
    engine_->submit(tracked);
  } catch (...) {
    tracked->complete(std::current_exception());
    throw;
  }
  work->setSequence(tracked->request.seq);
  WorkRef result = work;
  if (coalescing) collecting(result);
  return result;
}

void ProcessGroupFastcoll::recordParameters(const Call& call, const char* name, std::uint64_t seq,
                                            bool pointToPoint) const {
  int64_t in = 0;
  int64_t out = 0;
  for (const auto& tensor : call.inputs) in += tensor.numel();
  for (const auto& tensor : call.outputs) out += tensor.numel();
  const auto type = call.inputs.empty() ? at::kByte : call.inputs[0].scalar_type();
  RECORD_PARAM_COMMS_DATA(std::make_tuple(static_cast<int64_t>(seq), pointToPoint),
                          std::make_tuple(pg_uid_, pg_desc_), call.inputs, call.outputs, rank_,
                          name, in, out, type, std::vector<int64_t>(), std::vector<int64_t>(), -1,
                          -1, size_);
}

}  // namespace fastcoll
