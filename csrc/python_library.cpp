// The library of the device engine. C++ makes NCCL's calls; fastcoll.cuda.engine makes
// communicators and runs kernels, and is called from here.
#include "python_library.hpp"

#include <pybind11/chrono.h>
#include <pybind11/stl.h>
#include <torch/csrc/utils/pybind.h>

#include <algorithm>
#include <limits>
#include <unordered_set>

#include "device/communicators.hpp"
#include "process_group.hpp"
#include "torch_error.hpp"

namespace fastcoll {
namespace {

ErrorKind kindOf(const py::error_already_set& error) {
  if (error.matches(PyExc_ValueError)) return ErrorKind::Value;
  if (error.matches(PyExc_TypeError)) return ErrorKind::Type;
  return ErrorKind::Backend;
}

std::string textOf(const py::error_already_set& error) {
  return py::str(error.value()).cast<std::string>();
}

/// Translates a Python exception into an error of the engine. What is no Exception (the user has
/// ended the program) is rethrown as it is.
[[noreturn]] void rethrow(const py::error_already_set& error) {
  if (!error.matches(PyExc_Exception)) throw;
  throw Error(kindOf(error), textOf(error));
}

[[noreturn]] void throwAborted() {
  throw Error(ErrorKind::Backend, concat("the group was aborted", kInitAgain));
}

/// The library of the engine. It makes NCCL's calls itself. A Python object makes what is made
/// once, and runs the kernels:
///   prepare(device, pair, captured)       makes a communicator
///   split(device, color, key, child)      splits it; `child` is another such object, or None
///   kernel_bytes(device)                  size of the largest all-reduce that a kernel may serve;
///                                         the largest int: an algorithm is forced
///   compile(tasks, options, device)       compiles kernels for a kind of collectives; returns
///                                         whether kernels serve any of them
///   serve(tasks, options, stream, device) runs kernels; returns which tasks are left to NCCL,
///                                         or None: all, whenever such tasks come
///   refuse(call)                          raises why there is no NCCL for it
///   set_timeout(timedelta)                from the next call on
///   close()
///   communicators: Communicators
class PythonLibrary : public DeviceLibrary {
 public:
  explicit PythonLibrary(py::object engine)
      : engine_(std::make_unique<py::object>(std::move(engine))),
        serve_(std::make_unique<py::object>(engine_->attr("serve"))),
        compile_(std::make_unique<py::object>(engine_->attr("compile"))),
        communicators_(engine_->attr("communicators").cast<std::shared_ptr<Communicators>>()) {}

  ~PythonLibrary() override {
    // If the interpreter is gone, nothing can free them.
    if (Py_IsInitialized() == 0) {
      engine_.release();
      serve_.release();
      compile_.release();
      return;
    }
    const py::gil_scoped_acquire gil;
    serve_.reset();
    compile_.reset();
    engine_.reset();
  }

  void prepare(c10::Device device, int pair, bool captured) override {
    const py::gil_scoped_acquire gil;
    try {
      engine_->attr("prepare")(static_cast<int>(device.index()), pair, captured);
      if (pair < 0) askHowFar(device);
    } catch (const py::error_already_set& error) {
      rethrow(error);
    }
  }

  void split(c10::Device device, int color, int key, DeviceLibrary* child) override {
    const std::lock_guard<std::timed_mutex> calling(communicators_->calling());
    const py::gil_scoped_acquire gil;
    try {
      auto* part = dynamic_cast<PythonLibrary*>(child);
      const py::object theirs = part != nullptr ? *part->engine_ : py::object(py::none());
      engine_->attr("split")(static_cast<int>(device.index()), color, key, theirs);
      if (part != nullptr) part->askHowFar(device);
    } catch (const py::error_already_set& error) {
      rethrow(error);
    }
  }

  void compile(const std::vector<DeviceRequest>& requests, const c10::Stream& stream) override {
    const c10::DeviceIndex device = stream.device_index();
    for (const Indices& those : forKernels(requests, device)) {
      const std::string kind = kindOf(requests, those, device);
      {
        const std::lock_guard<std::mutex> lock(kindsMutex_);
        if (plain_.count(kind) != 0 || compiled_.count(kind) != 0) continue;
      }
      const py::gil_scoped_acquire gil;
      try {
        const c10::DeviceGuard onDevice(stream.device());
        const bool serves = (*compile_)(tasksOf(requests, those), optionsOf(requests[those[0]]),
                                        static_cast<int>(device))
                                .cast<bool>();
        note(serves ? compiled_ : plain_, kind);
      } catch (const py::error_already_set& error) {
        rethrow(error);
      }
    }
  }

  void issue(const std::vector<DeviceRequest>& requests, const c10::Stream& stream,
             int pair) override {
    const std::lock_guard<std::timed_mutex> calling(communicators_->calling());
    if (communicators_->aborted()) throwAborted();
    const std::vector<bool> served = pair < 0 ? byKernels(requests, stream) : std::vector<bool>();
    if (std::find(served.begin(), served.end(), true) == served.end()) {
      return byNccl(requests, stream, pair);
    }
    std::vector<DeviceRequest> left;
    for (std::size_t i = 0; i < requests.size(); ++i) {
      if (!served[i]) left.push_back(requests[i]);
    }
    if (!left.empty()) byNccl(left, stream, pair);
  }

  void setTimeout(Milliseconds timeout) override {
    const py::gil_scoped_acquire gil;
    try {
      engine_->attr("set_timeout")(timeout);
    } catch (const py::error_already_set& error) {
      rethrow(error);
    }
  }

  std::shared_ptr<Communicators> communicators() override { return communicators_; }

  void close() noexcept override {
    if (Py_IsInitialized() == 0) return;
    const py::gil_scoped_acquire gil;
    try {
      engine_->attr("close")();
    } catch (const py::error_already_set& error) {
      log(LogLevel::Warn, "closing the device's library failed: " + textOf(error));
    }
  }

 private:
  using Indices = std::vector<std::size_t>;

  /// Records the size above which NCCL serves every single all-reduce without options.
  void askHowFar(c10::Device device) {
    const int index = device.index();
    const auto bytes = engine_->attr("kernel_bytes")(index).cast<std::int64_t>();
    const std::lock_guard<std::mutex> lock(kindsMutex_);
    kernelBytes_[index] = bytes;
  }

  void byNccl(const std::vector<DeviceRequest>& requests, const c10::Stream& stream, int pair) {
    const auto calls = communicators_->find(stream.device_index(), pair);
    if (calls != nullptr) return calls->issue(requests, handleOf(stream));
    if (communicators_->aborted()) throwAborted();
    const py::gil_scoped_acquire gil;
    try {
      engine_->attr("refuse")(collectiveName(requests[0].collective));
    } catch (const py::error_already_set& error) {
      rethrow(error);
    }
  }

  /// The requests that kernels may serve; all-reduces with the same options form one group. If an
  /// algorithm is forced, also each reduce-scatter and all-gather by itself: the ring serves them.
  std::vector<Indices> forKernels(const std::vector<DeviceRequest>& requests,
                                  c10::DeviceIndex device) {
    std::int64_t limit = 0;
    {
      const std::lock_guard<std::mutex> lock(kindsMutex_);
      const auto found = kernelBytes_.find(device);
      if (found != kernelBytes_.end()) limit = found->second;
    }
    std::vector<Indices> together;
    for (std::size_t i = 0; i < requests.size(); ++i) {
      const DeviceRequest& one = requests[i];
      if (one.collective == Collective::ReduceScatter || one.collective == Collective::AllGather) {
        if (limit == std::numeric_limits<std::int64_t>::max()) together.push_back({i});
        continue;
      }
      if (one.collective != Collective::AllReduce) continue;
      if (limit == 0 && one.options == nullptr) continue;
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
      return those.size() == 1 && one.options == nullptr && bytesOf(one) > limit;
    };
    together.erase(std::remove_if(together.begin(), together.end(), tooLarge), together.end());
    return together;
  }

  /// Lets kernels serve their requests. Returns which were served; empty: none.
  std::vector<bool> byKernels(const std::vector<DeviceRequest>& requests,
                              const c10::Stream& stream) {
    std::vector<bool> served;
    for (const Indices& those : forKernels(requests, stream.device_index())) {
      const std::string kind = kindOf(requests, those, stream.device_index());
      {
        const std::lock_guard<std::mutex> lock(kindsMutex_);
        if (plain_.count(kind) != 0) continue;
      }
      const auto left = ask(requests, those, stream);
      if (!left) {
        note(plain_, kind);
        continue;
      }
      served.resize(requests.size());
      for (const std::size_t i : those) served[i] = true;
      for (const std::size_t i : *left) served[those.at(i)] = false;
    }
    return served;
  }

  /// Lets kernels serve these. Returns which are left to NCCL; nullopt: all, always.
  std::optional<Indices> ask(const std::vector<DeviceRequest>& requests, const Indices& those,
                             const c10::Stream& stream) {
    const py::gil_scoped_acquire gil;
    try {
      return (*serve_)(tasksOf(requests, those), optionsOf(requests[those[0]]), handleOf(stream),
                       static_cast<int>(stream.device_index()))
          .cast<std::optional<Indices>>();
    } catch (const py::error_already_set& error) {
      rethrow(error);
    }
  }

  static py::tuple tasksOf(const std::vector<DeviceRequest>& requests, const Indices& those) {
    py::tuple tasks(those.size());
    for (std::size_t i = 0; i < those.size(); ++i) {
      const DeviceRequest& one = requests[those[i]];
      tasks[i] =
          py::make_tuple(collectiveName(one.collective), static_cast<int>(one.dtype),
                         static_cast<int>(one.op), one.in.address, one.out.address, one.in.count);
    }
    return tasks;
  }

  static py::object optionsOf(const DeviceRequest& request) {
    const auto& given = request.options;
    if (given == nullptr) return py::none();
    return py::make_tuple(given->wire ? static_cast<int>(*given->wire) : -1, given->scale,
                          given->algorithm, given->fuse);
  }

  void note(std::unordered_set<std::string>& kinds, const std::string& kind) {
    const std::lock_guard<std::mutex> lock(kindsMutex_);
    if (kinds.size() >= kMostKinds) kinds.clear();
    kinds.insert(kind);
  }

  /// A key of all in these collectives that decides on the choice and on a kernel's code.
  static std::string kindOf(const std::vector<DeviceRequest>& requests, const Indices& those,
                            c10::DeviceIndex device) {
    std::string kind(1, static_cast<char>(device));
    if (const auto& given = requests[those[0]].options) {
      kind += static_cast<char>(given->wire ? static_cast<int>(*given->wire) : -1);
      kind += static_cast<char>(given->fuse ? static_cast<int>(*given->fuse) : -1);
      kind.append(reinterpret_cast<const char*>(&given->scale), sizeof(given->scale));
      kind += given->algorithm;
    }
    for (const std::size_t i : those) {
      const DeviceRequest& one = requests[i];
      kind += static_cast<char>(one.collective);
      kind += static_cast<char>(one.dtype);
      kind += static_cast<char>(one.op);
      kind += static_cast<char>((one.in.address | one.out.address) % kAlignment);
      kind += static_cast<char>(one.in.address == one.out.address);
      kind.append(reinterpret_cast<const char*>(&one.in.count), sizeof(one.in.count));
    }
    return kind;
  }

  static std::int64_t bytesOf(const DeviceRequest& request) {
    return request.in.count * static_cast<std::int64_t>(elementSize(request.dtype));
  }

  static std::uintptr_t handleOf(const c10::Stream& stream) {
    return reinterpret_cast<std::uintptr_t>(stream.native_handle());
  }

  static constexpr std::size_t kMostKinds = 4096;
  static constexpr std::uintptr_t kAlignment = 16;  // of 128-bit loads, as in cuda/all_reduce.py

  std::unique_ptr<py::object> engine_;
  std::unique_ptr<py::object> serve_;
  std::unique_ptr<py::object> compile_;
  const std::shared_ptr<Communicators> communicators_;
  std::mutex kindsMutex_;                    // guards the rest; not held during a call of Python
  std::map<int, std::int64_t> kernelBytes_;  // by device; 0: NCCL serves all without options
  std::unordered_set<std::string> plain_;    // kinds that NCCL serves
  std::unordered_set<std::string> compiled_;
};

}  // namespace

void setDeviceFactory(py::object factory) {
  // Leaked on purpose: the interpreter may be gone when static destructors run.
  auto* held = new py::object(std::move(factory));
  ProcessGroupFastcoll::setDeviceFactory(
      [held](const c10::intrusive_ptr<c10d::Store>& store, const std::string& name, int rank,
             int size, const c10::intrusive_ptr<Options>& options,
             c10::DeviceType type) -> std::unique_ptr<DeviceLibrary> {
        const py::gil_scoped_acquire gil;
        try {
          return std::make_unique<PythonLibrary>((*held)(
              store, name, rank, size, options, c10::DeviceTypeName(type, /*lower_case=*/true)));
        } catch (const py::error_already_set& error) {
          rethrow(error);
        }
      });
}

}  // namespace fastcoll
