// The Python module fastcoll._cuda, all that moves device tensors; fastcoll/_cuda.pyi documents it.
#include <pybind11/chrono.h>
#include <pybind11/functional.h>
#include <pybind11/stl.h>
#include <torch/csrc/utils/pybind.h>

#include <array>
#include <tuple>
#include <variant>

#include "bindings/python.hpp"
#include "cuda/bindings/bindings.hpp"
#include "cuda/bindings/python_library.hpp"
#include "cuda/communicators.hpp"
#include "cuda/nccl.hpp"
#include "cuda/plans.hpp"
#include "torch/error.hpp"

namespace fastcoll {
namespace {

template <typename Enum>
py::tuple names(int count, const char* (*nameOf)(Enum)) {
  py::tuple all(count);
  for (int i = 0; i < count; ++i) all[i] = nameOf(static_cast<Enum>(i));
  return all;
}

/// `words`: int64, on the host. It is freed without the GIL.
void addKernels(Communicators& communicators, const at::Tensor& words, std::string prefix,
                int size) {
  const py::gil_scoped_release released;
  auto* const first = words.data_ptr<std::int64_t>();
  std::shared_ptr<std::int64_t> memory(first, [words](std::int64_t*) {});
  communicators.addKernels({std::move(memory), std::move(prefix), size});
}

PlannedCalls plannedCalls(
    const std::vector<std::tuple<int, int, int, int, std::uintptr_t, std::int64_t, std::uintptr_t,
                                 std::int64_t>>& calls,
    bool fromSource, bool toOut) {
  PlannedCalls planned{{}, fromSource, toOut};
  for (const auto& [collective, dtype, op, root, in, inCount, out, outCount] : calls) {
    DeviceRequest& request = planned.requests.emplace_back();
    request.collective = static_cast<Collective>(collective);
    request.dtype = static_cast<DType>(dtype);
    request.op = static_cast<ReduceOp>(op);
    request.root = root;
    request.in = {in, inCount};
    request.out = {out, outCount};
  }
  return planned;
}

void bindKernels(py::module_& m) {
  py::class_<Kernel, std::shared_ptr<Kernel>>(m, "Kernel")
      .def(
          py::init([](const c10::Device& device, std::string name, const std::string& code,
                      const std::string& entry, unsigned threads, unsigned sharedBytes) {
            const py::gil_scoped_release loading;  // pybind registers what is returned with the GIL
            return translated([&] {
              return std::shared_ptr<Kernel>(std::make_shared<LoadedKernel>(
                  device, std::move(name), code, entry, threads, sharedBytes));
            });
          }),
          py::arg("device"), py::arg("name"), py::arg("code"), py::arg("entry"), py::arg("threads"),
          py::arg("shared_bytes"))
      .def_static("interpreted", &interpretedKernel, py::arg("function"));
  py::class_<Launch>(m, "Launch")
      .def(py::init([](std::shared_ptr<Kernel> kernel, std::int64_t programs,
                       const std::vector<std::int64_t>& arguments, py::object held, int sourceAt,
                       int outAt, int squaresAt,
                       const std::optional<std::array<std::int64_t, 5>>& pieces) {
             Launch made;
             made.kernel = std::move(kernel);
             made.programs = programs;
             made.arguments.assign(arguments.begin(), arguments.end());
             made.held = heldByPython(std::move(held));
             made.sourceAt = sourceAt;
             made.outAt = outAt;
             made.squaresAt = squaresAt;
             if (pieces) {
               const auto [at, block, grain, most, channels] = *pieces;
               made.pieces = Pieces{static_cast<int>(at), block, grain, most, channels};
             }
             return made;
           }),
           py::arg("kernel"), py::arg("programs"), py::arg("arguments"), py::arg("held"),
           py::arg("source_at") = -1, py::arg("out_at") = -1, py::arg("squares_at") = -1,
           py::arg("pieces") = py::none())
      .def("fixed",
           [](Launch launch) {
             launch.sourceAt = launch.outAt = -1;
             return launch;
           })
      .def(
          "__call__",
          [](const Launch& launch) {
            translated([&] { launch.run(launch.kernel->currentStream()); });
          },
          py::call_guard<py::gil_scoped_release>());
  py::class_<PlannedCalls>(m, "PlannedCalls")
      .def(py::init(&plannedCalls), py::arg("calls"), py::arg("from_source") = false,
           py::arg("to_out") = false);
  py::class_<PlanPart>(m, "PlanPart")
      .def(py::init([](std::string algorithm, std::vector<std::size_t> tasks,
                       std::vector<std::variant<Launch, PlannedCalls>> steps, bool tables,
                       py::object held) {
             return PlanPart{std::move(algorithm), std::move(tasks), std::move(steps), tables,
                             heldByPython(std::move(held))};
           }),
           py::arg("algorithm"), py::arg("tasks"), py::arg("steps"), py::arg("tables"),
           py::arg("held"))
      .def_readonly("algorithm", &PlanPart::algorithm);
  py::class_<Plan, std::shared_ptr<Plan>>(m, "Plan")
      .def(py::init([](std::vector<PlanPart> parts, std::vector<std::size_t> left, bool usesPeers,
                       bool ofCount) {
             return Plan{std::move(parts), std::move(left), usesPeers, ofCount};
           }),
           py::arg("parts"), py::arg("left"), py::arg("uses_peers"), py::arg("of_count"))
      .def_readonly("parts", &Plan::parts)
      .def_property_readonly("launches", &Plan::launches);
  py::class_<Plans, std::shared_ptr<Plans>>(m, "Plans")
      .def(py::init<std::int64_t, std::vector<std::int64_t>>(), py::arg("kernel_bytes"),
           py::arg("limits"))
      .def("forget", &Plans::forget, py::call_guard<py::gil_scoped_release>())
      .def("clear", &Plans::clear, py::call_guard<py::gil_scoped_release>())
      .def_property_readonly("built", &Plans::built)
      .def_property_readonly("placed", &Plans::placed)
      .def_property_readonly("pinned", &Plans::pinned)
      .def("values", &Plans::plans);
}

void bindNccl(py::module_& m) {
  py::class_<NcclFunctions, std::shared_ptr<NcclFunctions>>(m, "NcclFunctions")
      .def(py::init([](const std::function<std::uintptr_t(const char*)>& addressOf, int version) {
             return translated([&] { return std::make_shared<NcclFunctions>(addressOf, version); });
           }),
           py::arg("address_of"), py::arg("version"))
      .def("describe", &NcclFunctions::describe, py::arg("status"));
  py::class_<NcclCalls, std::shared_ptr<NcclCalls>>(m, "NcclCalls")
      .def(py::init([](std::shared_ptr<NcclFunctions> functions, std::uintptr_t communicator,
                       int ranks, Milliseconds patience) {
             return std::make_shared<NcclCalls>(std::move(functions), communicator, ranks,
                                                patience);
           }),
           py::arg("functions"), py::arg("communicator"), py::arg("ranks"), py::arg("patience"))
      .def(
          "issue",
          [](NcclCalls& calls, int collective, int dtype, int op, int root, double factor,
             std::uintptr_t factorOnDevice, std::uintptr_t in, std::int64_t inCount,
             std::uintptr_t out, std::int64_t outCount, std::uintptr_t stream) {
            DeviceRequest request;
            request.collective = static_cast<Collective>(collective);
            request.dtype = static_cast<DType>(dtype);
            request.op = static_cast<ReduceOp>(op);
            request.root = root;
            request.factor = factor;
            request.factorOnDevice = factorOnDevice;
            request.in = {in, inCount};
            request.out = {out, outCount};
            translated([&] { calls.issue({request}, stream); });
          },
          py::call_guard<py::gil_scoped_release>())
      .def("end", &NcclCalls::end);
  py::class_<Communicators, std::shared_ptr<Communicators>>(m, "Communicators")
      .def(py::init<std::string>(), py::arg("group") = "")
      .def("join", &Communicators::join, py::arg("other"), py::call_guard<py::gil_scoped_release>())
      .def("end_family", &Communicators::endFamily, py::arg("cause"),
           py::call_guard<py::gil_scoped_release>())
      .def_property_readonly("family",
                             [](const Communicators& all) {
                               return reinterpret_cast<std::uintptr_t>(all.family().get());
                             })
      .def("memory",
           [](const Communicators& all) {
             std::vector<std::pair<std::string, std::optional<std::int64_t>>> found;
             const py::gil_scoped_release unlocked;
             for (const CommunicatorMemory& one : all.memory()) {
               found.emplace_back(one.name,
                                  one.bytes < 0 ? std::nullopt : std::optional(one.bytes));
             }
             return found;
           })
      .def("add", &Communicators::add, py::arg("calls"), py::arg("device"), py::arg("name"),
           py::arg("instance"), py::arg("peer"), py::call_guard<py::gil_scoped_release>())
      .def("remove", &Communicators::remove, py::arg("calls"),
           py::call_guard<py::gil_scoped_release>())
      .def("find", &Communicators::find, py::arg("device"), py::arg("peer"),
           py::call_guard<py::gil_scoped_release>())
      .def("add_kernels", &addKernels, py::arg("words"), py::arg("prefix"), py::arg("size"))
      .def("abort_all", &Communicators::abortAll, py::arg("cause"),
           py::call_guard<py::gil_scoped_release>())
      .def(
          "begin_calls", [](Communicators& all) { all.calling().lock(); },
          py::call_guard<py::gil_scoped_release>())
      .def("end_calls", [](Communicators& all) { all.calling().unlock(); })
      .def_property_readonly("aborted", &Communicators::aborted)
      .def_property_readonly("abort_cause", &Communicators::abortCause);
}

}  // namespace
}  // namespace fastcoll

PYBIND11_MODULE(_cuda, m) {
  using namespace fastcoll;
  py::module_::import("fastcoll._C");  // whose functions and types these need
  bindNccl(m);
  bindKernels(m);
  bindRoster(m);
  bindSymmetricMemory(m);
  m.def("set_device_factory", &setDeviceFactory, py::arg("factory"));
  m.def("set_nccl_allocator", &setNcclAllocator, py::arg("allocate"), py::arg("free"));
  m.attr("COLLECTIVES") =
      names<Collective>(static_cast<int>(Collective::Recv) + 1, &collectiveName);
  m.attr("DTYPES") = names<DType>(static_cast<int>(DType::Opaque) + 1, &dtypeName);
  m.attr("REDUCE_OPS") = names<ReduceOp>(static_cast<int>(ReduceOp::PreMulSum) + 1, &reduceOpName);
}
