// Python bindings of the device half: calls of NCCL, communicators, memory of NCCL, kernels.
#include "bindings.hpp"

#include <pybind11/chrono.h>
#include <pybind11/stl.h>
#include <torch/csrc/utils/pybind.h>

#include "device/capture.hpp"
#include "device/communicators.hpp"
#include "device/nccl.hpp"
#include "device/nccl_allocator.hpp"
#include "python_library.hpp"
#include "torch_error.hpp"

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

}  // namespace

void bindDevice(py::module_& m) {
  py::class_<NcclFunctions, std::shared_ptr<NcclFunctions>>(m, "NcclFunctions")
      .def(py::init<const std::map<std::string, std::uintptr_t>&, int>(), py::arg("addresses"),
           py::arg("version"))
      .def("describe", &NcclFunctions::describe, py::arg("status"));
  py::class_<NcclCalls, std::shared_ptr<NcclCalls>>(m, "NcclCalls")
      .def(py::init([](std::shared_ptr<NcclFunctions> functions, std::uintptr_t communicator,
                       int ranks, Milliseconds patience) {
             return std::make_shared<NcclCalls>(std::move(functions), communicator, ranks,
                                                patience);
           }),
           py::arg("functions"), py::arg("communicator"), py::arg("ranks"), py::arg("patience"))
      .def_property_readonly("communicator", &NcclCalls::communicator)
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
      .def(
          "begin_group", [](NcclCalls& calls) { translated([&] { calls.beginGroup(); }); },
          py::call_guard<py::gil_scoped_release>())
      .def(
          "end_group", [](NcclCalls& calls) { translated([&] { calls.endGroup(); }); },
          py::call_guard<py::gil_scoped_release>())
      .def("end", &NcclCalls::end);
  py::class_<Communicators, std::shared_ptr<Communicators>>(m, "Communicators")
      .def(py::init<>())
      .def("add", &Communicators::add, py::arg("calls"), py::arg("device"), py::arg("name"),
           py::arg("instance"), py::arg("peer"), py::call_guard<py::gil_scoped_release>())
      .def("remove", &Communicators::remove, py::arg("calls"),
           py::call_guard<py::gil_scoped_release>())
      .def("find", &Communicators::find, py::arg("device"), py::arg("peer"),
           py::call_guard<py::gil_scoped_release>())
      .def("add_kernels", &addKernels, py::arg("words"), py::arg("prefix"), py::arg("size"))
      .def("abort_all", &Communicators::abortAll, py::call_guard<py::gil_scoped_release>())
      .def(
          "begin_calls", [](Communicators& all) { all.calling().lock(); },
          py::call_guard<py::gil_scoped_release>())
      .def("end_calls", [](Communicators& all) { all.calling().unlock(); })
      .def_property_readonly("aborted", &Communicators::aborted);
  m.def("set_device_factory", &setDeviceFactory, py::arg("factory"));
  m.def("set_nccl_allocator", &setNcclAllocator, py::arg("allocate"), py::arg("free"));
  m.attr("COLLECTIVES") =
      names<Collective>(static_cast<int>(Collective::Recv) + 1, &collectiveName);
  m.attr("DTYPES") = names<DType>(static_cast<int>(DType::Opaque) + 1, &dtypeName);
  m.attr("REDUCE_OPS") = names<ReduceOp>(static_cast<int>(ReduceOp::PreMulSum) + 1, &reduceOpName);
}

}  // namespace fastcoll
