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

  void compile(const std::vector<DeviceRequest>& requests, const c10::Stream& stream) override {
    const auto own = plannerOf(stream);
    if (own.plans == nullptr) return;
    for (const Indices& those : own.plans->forKernels(requests)) {
      const PlanKey kind = own.plans->kindOf(requests, those);
      if (own.plans->served(kind)) continue;
      const bool serves = inPython([&] {
        const c10::DeviceGuard onDevice(stream.device());
        return own("compile", tasksOf(requests, those), optionsOf(requests[those[0]])).cast<bool>();
      });
      own.plans->note(kind, serves);
    }
  }

  void issue(const std::vector<DeviceRequest>& requests, const c10::Stream& stream, int pair,
             bool captured) override {
    const std::lock_guard<std::timed_mutex> calling(communicators_->calling());
    if (communicators_->aborted()) throwAborted();
    const Capture capture = captured ? captureOf(stream) : Capture{};
    const auto ready = pair < 0 ? forKernels(requests, stream, capture.id) : std::vector<Ready>();
    if (ready.empty()) return byNccl(requests, stream, pair);
    std::vector<bool> served(requests.size());
    for (const Ready& one : ready) {
      for (const std::size_t i : one.requests) served[i] = true;
    }
    std::vector<DeviceRequest> left;
    for (std::size_t i = 0; i < requests.size(); ++i) {
      if (!served[i]) left.push_back(requests[i]);
    }
    if (!left.empty()) byNccl(left, stream, pair);  // first, because it may refuse a request
    const auto calls = communicators_->find(stream.device_index(), -1);
    if (calls == nullptr) throwAborted();
    const auto plans = plannerOf(stream).plans;
    for (const Ready& one : ready) {
      if (captured) plans->pin(one.placed, capture);
      const bool usesPeers = one.placed->plan->usesPeers;
      if (usesPeers) plans->follow(stream, capture);
      const auto& options = requests[one.requests[0]].options;
      const std::uintptr_t squares = options == nullptr ? 0 : options->squares;
      one.placed->plan->run(one.placed->places, squares, *calls, stream.native_handle());
      if (usesPeers) plans->launched(stream, capture);
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

  void byNccl(const std::vector<DeviceRequest>& requests, const c10::Stream& stream, int pair) {
    const auto calls = communicators_->find(stream.device_index(), pair);
    if (calls != nullptr) return calls->issue(requests, handleOf(stream));
    if (communicators_->aborted()) throwAborted();
    throw Error(ErrorKind::Value,
                "internal error: there is no communicator of NCCL. Please report this.");
  }

  /// A plan for some of the requests.
  struct Ready {
    std::shared_ptr<const PlacedPlan> placed;
    Indices requests;
  };

  /// Plans those requests that kernels serve; launches nothing.
  std::vector<Ready> forKernels(const std::vector<DeviceRequest>& requests,
                                const c10::Stream& stream, std::uint64_t capture) {
    std::vector<Ready> ready;
    const auto own = plannerOf(stream);
    const auto& plans = own.plans;
    if (plans == nullptr) return ready;
    // While a graph captures, nothing is freed.
    if (capture == 0) plans->release();
    if (capture == 0 && plans->outdated.exchange(false)) plans->forget();
    for (const Indices& those : plans->forKernels(requests)) {
      const PlanKey kind = plans->kindOf(requests, those);
      if (plans->served(kind) == false) continue;
      auto placed = place(own, kind, requests, those, stream, capture);
      if (placed == nullptr) continue;
      const auto& left = placed->plan->left;
      Indices served;
      for (std::size_t i = 0; i < those.size(); ++i) {
        if (std::ranges::find(left, i) == left.end()) served.push_back(those[i]);
      }
      if (!served.empty()) ready.push_back({std::move(placed), std::move(served)});
    }
    return ready;
  }

  /// The plan for these requests with their addresses, made if there is none. nullptr: NCCL serves
  /// all such requests.
  std::shared_ptr<const PlacedPlan> place(const Planner& own, const PlanKey& kind,
                                          const std::vector<DeviceRequest>& requests,
                                          const Indices& those, const c10::Stream& stream,
                                          std::uint64_t capture) {
    Plans& plans = *own.plans;
    const std::int64_t count = requests[those[0]].in.count;
    const PlanKey key = plans.keyOf(kind, requests, those, handleOf(stream), capture);
    PlanKey exact{kind.options, {}, key.stream, capture};
    for (const std::size_t i : those) {
      exact.requests.push_back(requests[i]);
      exact.requests.back().options = nullptr;
    }
    auto plan = plans.find(key, count);
    if (plan == nullptr) {
      if (const auto known = plans.findPlaced(exact)) return known;
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
