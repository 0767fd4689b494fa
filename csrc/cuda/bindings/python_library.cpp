// The library of the device engine. C++ makes NCCL's calls and launches kernels, and takes no GIL
// for a call that it has a plan for. fastcoll.cuda.engine makes communicators and plans.
#include "cuda/bindings/python_library.hpp"

#include <c10/core/DeviceGuard.h>
#include <pybind11/chrono.h>
#include <pybind11/stl.h>
#include <torch/csrc/utils/pybind.h>

#include <algorithm>

#include "base/log.hpp"
#include "bindings/python.hpp"
#include "cuda/communicators.hpp"
#include "cuda/cuda_engine.hpp"
#include "cuda/plans.hpp"

namespace fastcoll {
namespace {

/// A kernel that Triton interprets on the host.
class InterpretedKernel : public Kernel {
 public:
  explicit InterpretedKernel(const py::object& function) : function_(heldByPython(function)) {}
  void launch(unsigned programs, const KernelArguments& arguments, void*) const override {
    inPython([&] {
      py::tuple given(arguments.size());
      for (std::size_t i = 0; i < arguments.size(); ++i) given[i] = arguments[i];
      (*function_)(programs, given);
    });
  }
  void* currentStream() const override { return nullptr; }

 private:
  const std::shared_ptr<py::object> function_;
};

[[noreturn]] void throwAborted() {
  throw Error(ErrorKind::Backend, "the group was aborted", kInitAgain);
}

/// The library of the engine. It makes NCCL's calls and launches kernels itself. A Python object
/// makes what is made once:
///   prepare(device, pair, captured)       makes a communicator
///   split(device, color, key, child)      splits it; `child` is another such object, or None
///   all_reduces[device]                   of a device with a communicator of all ranks:
///     plans                               its Plans
///     compile(tasks, options)             compiles kernels for a kind of collectives; returns
///                                         whether kernels serve any of them
///     plan(tasks, options, stream, capture)
///                                         a Plan, or None: NCCL serves all such tasks; `capture`:
///                                         the id of the stream's capture, or 0
///     tables(tasks)                       addresses of two tables with the tasks' addresses, and
///                                         what holds them
///   set_timeout(timedelta)                from the next call on
///   close()
///   communicators: Communicators
class PythonLibrary : public DeviceLibrary {
 public:
  explicit PythonLibrary(py::object engine)
      : engine_(heldByPython(std::move(engine))),
        communicators_(engine_->attr("communicators").cast<std::shared_ptr<Communicators>>()) {}

  void prepare(c10::Device device, int pair, bool captured) override {
    inPython([&] {
      engine_->attr("prepare")(static_cast<int>(device.index()), pair, captured);
      if (pair < 0) takePlanner(device);
    });
  }

  void split(c10::Device device, int color, int key, DeviceLibrary* child) override {
    const std::lock_guard<std::timed_mutex> calling(communicators_->calling());
    inPython([&] {
      auto* part = dynamic_cast<PythonLibrary*>(child);
      const py::object theirs = part != nullptr ? *part->engine_ : py::object(py::none());
      engine_->attr("split")(static_cast<int>(device.index()), color, key, theirs);
      if (part != nullptr) part->takePlanner(device);
    });
  }

  void compile(DeviceLaunch& launch, const c10::Stream& stream) override {
    if (const auto* known = static_cast<Found*>(launch.found.get())) {
      if (known->stream == handleOf(stream) && known->capture == 0) return;
    }
    launch.found = nullptr;
    const auto own = plannerOf(stream);
    if (own.plans == nullptr) return;
    const auto& requests = launch.requests;
    auto found = groupsOf(*own.plans, requests, handleOf(stream), 0);
    if (found == nullptr) return;
    for (Group& group : found->groups) {
      if (group.placed != nullptr || own.plans->served(group.kind)) continue;
      const bool serves = inPython([&] {
        const c10::DeviceGuard onDevice(stream.device());
        return own("compile", tasksOf(requests, group.those), optionsOf(requests[group.those[0]]))
            .cast<bool>();
      });
      own.plans->note(group.kind, serves);
    }
    launch.found = std::move(found);
  }

  void choose(DeviceLaunch& launch, const c10::Stream& stream, int pair, bool captured) override {
    const std::lock_guard<std::timed_mutex> calling(communicators_->calling());
    throwIfEnded();
    const auto own = pair < 0 ? plannerOf(stream) : Planner();
    if (own.plans == nullptr) return NcclCalls::throwIfRefused(launch.requests);
    Plans& plans = *own.plans;
    const Capture capture = captured ? captureOf(stream) : Capture{};
    // While a graph captures, nothing is freed.
    if (!captured) plans.release();
    if (!captured && plans.outdated.exchange(false)) plans.forget();
    if (captured) launch.found = groupsOf(plans, launch.requests, handleOf(stream), capture.id);
    auto* const found = static_cast<Found*>(launch.found.get());
    if (found == nullptr) return NcclCalls::throwIfRefused(launch.requests);
    if (!found->placed || found->forgotten != plans.forgotten()) {
      place(own, launch.requests, *found, stream, capture.id);
      NcclCalls::throwIfRefused(found->left);
    }
  }

  void issue(DeviceLaunch& launch, const c10::Stream& stream, int pair, bool captured) override {
    const std::lock_guard<std::timed_mutex> calling(communicators_->calling());
    throwIfEnded();
    const auto* const found = static_cast<Found*>(launch.found.get());
    if (found == nullptr) return byNccl(launch.requests, stream, pair);
    if (!found->left.empty()) byNccl(found->left, stream, pair);
    Plans& plans = *plannerOf(stream).plans;
    const Capture capture = captured ? captureOf(stream) : Capture{};
    const auto calls = communicators_->find(stream.device_index(), -1);
    if (calls == nullptr) throwAborted();
    for (const Group& group : found->groups) {
      if (group.placed == nullptr) continue;
      if (captured) plans.pin(group.placed, capture);
      const bool usesPeers = group.placed->plan->usesPeers;
      if (usesPeers) plans.follow(stream, capture);
      const auto& options = launch.requests[group.those[0]].options;
      const std::uintptr_t squares = options == nullptr ? 0 : options->squares;
      group.placed->plan->run(group.placed->places, squares, *calls, stream.native_handle());
      if (usesPeers) plans.launched(stream, capture);
    }
  }

  void setTimeout(Milliseconds timeout) override {
    inPython([&] { engine_->attr("set_timeout")(timeout); });
    const std::lock_guard<std::mutex> lock(plannersMutex_);
    for (const auto& [device, own] : planners_) own.plans->outdated.store(true);
  }

  std::shared_ptr<Communicators> communicators() override { return communicators_; }

  void close() noexcept override {
    if (Py_IsInitialized() == 0) return;
    const py::gil_scoped_acquire gil;
    {
      const std::lock_guard<std::mutex> lock(plannersMutex_);
      planners_.clear();
    }
    try {
      engine_->attr("close")();
    } catch (const py::error_already_set& error) {
      log(LogLevel::Warn, concat("closing the device's library failed: ",
                                 py::str(error.value()).cast<std::string>()));
    }
  }

 private:
  using Indices = Plans::Indices;

  /// Makes the plans of a device.
  struct Planner {
    std::shared_ptr<Plans> plans;
    std::shared_ptr<py::object> allReduces;
    /// Calls a method; with the GIL.
    template <typename... Given>
    py::object operator()(const char* method, Given&&... given) const {
      return allReduces->attr(method)(std::forward<Given>(given)...);
    }
  };

  /// Call it with the GIL.
  void takePlanner(c10::Device device) {
    const py::object made = engine_->attr("all_reduces")[py::int_(int{device.index()})];
    Planner own{made.attr("plans").cast<std::shared_ptr<Plans>>(), heldByPython(made)};
    const std::lock_guard<std::mutex> lock(plannersMutex_);
    planners_[device.index()] = std::move(own);
  }

  Planner plannerOf(const c10::Stream& stream) {
    const std::lock_guard<std::mutex> lock(plannersMutex_);
    const auto found = planners_.find(stream.device_index());
    return found == planners_.end() ? Planner() : found->second;
  }

  void throwIfEnded() const {
    throwFamilyFault();
    if (communicators_->aborted()) throwAborted();
  }

  void throwFamilyFault() const {
    const std::string cause = communicators_->familyFault();
    if (!cause.empty()) throw Error(ErrorKind::Backend, cause);
  }

  void byNccl(const std::vector<DeviceRequest>& requests, const c10::Stream& stream, int pair) {
    const auto calls = communicators_->find(stream.device_index(), pair);
    try {
      if (calls != nullptr) return calls->issue(requests, handleOf(stream));
    } catch (const Error&) {
      throwFamilyFault();  // the reason, if it ended this call
      throw;
    }
    if (communicators_->aborted()) throwAborted();
    throw Error(ErrorKind::Value,
                "internal error: there is no communicator of NCCL. Please report this.");
  }

  /// Requests that kernels may serve together.
  struct Group {
    Indices those;
    PlanKey kind;                              // if no plan was found by the exact key
    std::shared_ptr<const PlacedPlan> placed;  // nullptr: not yet, or NCCL serves them
  };
  /// What is found for a launch, on this stream.
  struct Found {
    std::uintptr_t stream;
    std::uint64_t capture;
    std::vector<Group> groups;
    // Set by place():
    bool placed = false;
    std::uint64_t forgotten = 0;        // Plans::forgotten()
    std::vector<DeviceRequest> left{};  // for NCCL
  };

  /// nullptr: there are no such requests. A list is looked up with its addresses first, because the
  /// buckets of a model come again with the same ones.
  static std::shared_ptr<Found> groupsOf(Plans& plans, const std::vector<DeviceRequest>& requests,
                                         std::uintptr_t stream, std::uint64_t capture) {
    auto groups = plans.forKernels(requests);
    if (groups.empty()) return nullptr;
    auto found = std::make_shared<Found>(Found{stream, capture, {}});
    found->forgotten = plans.forgotten();
    for (Indices& those : groups) {
      Group group{std::move(those), {}, nullptr};
      if (group.those.size() > 1) {
        group.placed = plans.findPlaced(Plans::exactKey(requests, group.those, stream, capture));
      }
      if (group.placed == nullptr) group.kind = plans.kindOf(requests, group.those);
      found->groups.push_back(std::move(group));
    }
    return found;
  }

  /// Plans those requests that kernels serve; launches nothing.
  void place(const Planner& own, const std::vector<DeviceRequest>& requests, Found& found,
             const c10::Stream& stream, std::uint64_t capture) {
    const std::uint64_t now = own.plans->forgotten();  // a plan that is made may forget others
    const bool forgotten = found.forgotten != now;
    std::vector<bool> served(requests.size());
    for (Group& group : found.groups) {
      if (forgotten || group.placed == nullptr) {
        group.placed = place(own, group, requests, stream, capture);
      }
      if (group.placed == nullptr) continue;
      for (const std::size_t i : group.those) served[i] = true;
      for (const std::size_t i : group.placed->plan->left) served[group.those[i]] = false;
    }
    found.left.clear();
    for (std::size_t i = 0; i < requests.size(); ++i) {
      if (!served[i]) found.left.push_back(requests[i]);
    }
    found.forgotten = now;
    found.placed = true;
  }

  /// The plan for these requests with their addresses, made if there is none. nullptr: NCCL serves
  /// all such requests.
  std::shared_ptr<const PlacedPlan> place(const Planner& own, Group& group,
                                          const std::vector<DeviceRequest>& requests,
                                          const c10::Stream& stream, std::uint64_t capture) {
    Plans& plans = *own.plans;
    const Indices& those = group.those;
    if (group.kind.requests.empty()) group.kind = plans.kindOf(requests, those);
    const PlanKey& kind = group.kind;
    if (plans.served(kind) == false) return nullptr;
    const std::int64_t count = requests[those[0]].in.count;
    const PlanKey key = plans.keyOf(kind, requests, those, handleOf(stream), capture);
    auto plan = plans.find(key, count);
    if (plan == nullptr) {
      plan = inPython([&] {
        return own("plan", tasksOf(requests, those), optionsOf(requests[those[0]]),
                   handleOf(stream), capture)
            .cast<std::shared_ptr<Plan>>();
      });
      if (plan == nullptr) {
        plans.note(kind, false);
        return nullptr;
      }
      plans.add(key, count, plan);
    }
    const bool tables = plan->readsTables();
    const PlanKey exact = Plans::exactKey(requests, those, key.stream, capture);
    if (const auto known = tables ? plans.findPlaced(exact) : nullptr) return known;
    auto placed = std::make_shared<PlacedPlan>();
    placed->plan = plan;
    for (const PlanPart& part : plan->parts) {
      const DeviceRequest& first = requests[those[part.tasks[0]]];
      placed->places.push_back({first.in.address, first.out.address, first.in.count});
      if (!part.tables) continue;
      Indices tasks;
      for (const std::size_t i : part.tasks) tasks.push_back(those[i]);
      inPython([&] {
        const auto [source, out, held] =
            own("tables", tasksOf(requests, tasks))
                .cast<std::tuple<std::uintptr_t, std::uintptr_t, py::object>>();
        placed->places.back() = {source, out, 0};
        placed->tables.push_back(heldByPython(held));
      });
    }
    if (tables) plans.addPlaced(exact, placed);
    return placed;
  }

  /// "opaque" elements are bytes.
  static py::object dtypeOf(DType dtype) {
    const py::module_ torch = py::module_::import("torch");
    return py::getattr(torch, dtypeName(dtype), torch.attr("uint8"));
  }

  static py::tuple tasksOf(const std::vector<DeviceRequest>& requests, const Indices& those) {
    py::tuple tasks(those.size());
    for (std::size_t i = 0; i < those.size(); ++i) {
      const DeviceRequest& one = requests[those[i]];
      tasks[i] = py::make_tuple(
          collectiveName(one.collective), dtypeOf(one.dtype),
          one.op == ReduceOp::None ? "" : reduceOpName(one.op), one.root,
          one.factorOnDevice != 0 ? py::object(py::none()) : py::object(py::float_(one.factor)),
          one.in.address, one.out.address, one.in.count);
    }
    return tasks;
  }

  static py::tuple optionsOf(const DeviceRequest& request) {
    const auto& given = request.options;
    if (given == nullptr) return py::tuple();
    return py::make_tuple(given->wire ? dtypeOf(*given->wire) : py::object(py::none()),
                          given->scale, given->algorithm, given->fuse, given->squares != 0);
  }

  static std::uintptr_t handleOf(const c10::Stream& stream) {
    return reinterpret_cast<std::uintptr_t>(stream.native_handle());
  }

  const std::shared_ptr<py::object> engine_;
  const std::shared_ptr<Communicators> communicators_;
  std::mutex plannersMutex_;
  std::map<int, Planner> planners_;  // by device
};

}  // namespace

std::shared_ptr<Kernel> interpretedKernel(const py::object& function) {
  return std::make_shared<InterpretedKernel>(function);
}

void setDeviceFactory(py::object factory) {
  setDeviceEngineMaker([&make = keptByPython(std::move(factory))](const DeviceGroup& group) {
    return std::make_shared<CudaEngine>(
        group, inPython([&] {
          const auto device = c10::DeviceTypeName(group.device, /*lower_case=*/true);
          return std::make_unique<PythonLibrary>(make(group.store, group.name, group.rank,
                                                      group.size, group.options, device,
                                                      group.settings.order));
        }));
  });
}

}  // namespace fastcoll
