// What Python sees of the device engine: the handles of communicators, and the way by which the
// engine calls fastcoll.cuda.engine.
#include "bindings_device.hpp"

#include <pybind11/chrono.h>
#include <torch/csrc/utils/pybind.h>

#include "device/capture.hpp"
#include "device/communicators.hpp"
#include "process_group.hpp"

namespace py = pybind11;

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

/// What becomes of an exception: the engine's own, or, for what is none of Python's Exceptions (the
/// user has asked the program to end), itself.
[[noreturn]] void rethrow(const py::error_already_set& error) {
  if (!error.matches(PyExc_Exception)) throw;
  throw Error(kindOf(error), textOf(error));
}

/// The engine's library in Python: an object with
///   prepare(device, pair, captured)       makes a communicator
///   split(device, color, key, child)      divides it; `child` is another such object, or None
///   issue(requests, stream, device, pair)
///   set_timeout(timedelta)                from the next call on
///   close()
///   communicators: Communicators
class PythonIssuer : public DeviceIssuer {
 public:
  explicit PythonIssuer(py::object engine)
      : engine_(std::make_unique<py::object>(std::move(engine))),
        issue_(std::make_unique<py::object>(engine_->attr("issue"))),
        communicators_(engine_->attr("communicators").cast<std::shared_ptr<Communicators>>()) {}

  ~PythonIssuer() override {
    // The interpreter may be gone, and with it whoever could free them.
    if (Py_IsInitialized() == 0) {
      engine_.release();
      issue_.release();
      return;
    }
    const py::gil_scoped_acquire gil;
    issue_.reset();
    engine_.reset();
  }

  void prepare(c10::Device device, int pair, bool captured) override {
    const py::gil_scoped_acquire gil;
    try {
      engine_->attr("prepare")(static_cast<int>(device.index()), pair, captured);
    } catch (const py::error_already_set& error) {
      rethrow(error);
    }
  }

  void split(c10::Device device, int color, int key, DeviceIssuer* child) override {
    const std::lock_guard<std::timed_mutex> calling(communicators_->calling());
    const py::gil_scoped_acquire gil;
    try {
      auto* part = dynamic_cast<PythonIssuer*>(child);
      const py::object theirs = part != nullptr ? *part->engine_ : py::object(py::none());
      engine_->attr("split")(static_cast<int>(device.index()), color, key, theirs);
    } catch (const py::error_already_set& error) {
      rethrow(error);
    }
  }

  void issue(const std::vector<DeviceRequest>& requests, const c10::Stream& stream,
             int pair) override {
    const std::lock_guard<std::timed_mutex> calling(communicators_->calling());
    const py::gil_scoped_acquire gil;
    try {
      py::list all(requests.size());
      for (std::size_t i = 0; i < requests.size(); ++i) {
        const DeviceRequest& one = requests[i];
        all[i] = py::make_tuple(static_cast<int>(one.collective), static_cast<int>(one.dtype),
                                static_cast<int>(one.op), one.root, one.factor, one.factorOnDevice,
                                one.in.address, one.in.count, one.out.address, one.out.count);
      }
      const auto handle = reinterpret_cast<std::uintptr_t>(stream.native_handle());
      (*issue_)(all, handle, static_cast<int>(stream.device_index()), pair);
    } catch (const py::error_already_set& error) {
      rethrow(error);
    }
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
  std::unique_ptr<py::object> engine_;
  std::unique_ptr<py::object> issue_;
  const std::shared_ptr<Communicators> communicators_;
};

void setDeviceFactory(py::object factory) {
  // Leaked on purpose: the interpreter may be gone when static destructors run.
  auto* held = new py::object(std::move(factory));
  ProcessGroupFastcoll::setDeviceFactory(
      [held](const c10::intrusive_ptr<c10d::Store>& store, const std::string& name, int rank,
             int size, std::chrono::milliseconds timeout,
             c10::DeviceType type) -> std::unique_ptr<DeviceIssuer> {
        const py::gil_scoped_acquire gil;
        try {
          return std::make_unique<PythonIssuer>((*held)(
              store, name, rank, size, timeout, c10::DeviceTypeName(type, /*lower_case=*/true)));
        } catch (const py::error_already_set& error) {
          rethrow(error);
        }
      });
}

template <typename Enum>
py::tuple names(int count, const char* (*nameOf)(Enum)) {
  py::tuple all(static_cast<std::size_t>(count));
  for (int i = 0; i < count; ++i) all[static_cast<std::size_t>(i)] = nameOf(static_cast<Enum>(i));
  return all;
}

}  // namespace

void bindDevice(py::module_& m) {
  py::class_<Communicators, std::shared_ptr<Communicators>>(m, "Communicators")
      .def(py::init([](const std::map<std::string, std::uintptr_t>& functions) {
             return std::make_shared<Communicators>(LibraryFunctions{
                 functions.at("ncclCommAbort"), functions.at("ncclCommGetAsyncError"),
                 functions.at("ncclGetErrorString"), functions.at("ncclGroupStart"),
                 functions.at("ncclGroupEnd")});
           }),
           py::arg("functions"))
      .def("add", &Communicators::add, py::arg("handle"), py::arg("name"), py::arg("instance"),
           py::arg("peer"), py::call_guard<py::gil_scoped_release>())
      .def("remove", &Communicators::remove, py::arg("handle"),
           py::call_guard<py::gil_scoped_release>())
      .def("report", &Communicators::report, py::arg("text"),
           py::call_guard<py::gil_scoped_release>())
      .def("abort_all", &Communicators::abortAll, py::call_guard<py::gil_scoped_release>())
      .def_property_readonly("aborted", &Communicators::aborted);
  m.def("set_device_factory", &setDeviceFactory, py::arg("factory"));
  m.def("leave_captures_alone", &leaveCapturesAlone);
  m.attr("COLLECTIVES") =
      names<Collective>(static_cast<int>(Collective::Recv) + 1, &collectiveName);
  m.attr("DTYPES") = names<DType>(static_cast<int>(DType::Opaque) + 1, &dtypeName);
  m.attr("REDUCE_OPS") = names<ReduceOp>(static_cast<int>(ReduceOp::PreMulSum) + 1, &reduceOpName);
}

}  // namespace fastcoll
