// The Python module fastcoll._C; fastcoll/_C.pyi documents it.
#include <ATen/Parallel.h>
#include <pybind11/chrono.h>
#include <torch/csrc/utils/pybind.h>

#include "base/interrupt.hpp"
#include "base/weak_registry.hpp"
#include "bindings/python.hpp"
#include "cpu/hosts/selector.hpp"
#include "network/gloo.hpp"
#include "process_group.hpp"
#include "reduce/digest.hpp"
#include "reduce/reduce.hpp"
#include "torch/error.hpp"

namespace py = pybind11;
using namespace fastcoll;  // NOLINT(google-build-using-namespace)

namespace {

template <typename T>
using Ref = c10::intrusive_ptr<T>;

/// Options(timeout, **fields): each field is set like an attribute.
Ref<Options> newOptions(std::chrono::milliseconds timeout, const py::kwargs& fields) {
  auto options = c10::make_intrusive<Options>(timeout);
  const py::object attributes = py::cast(options);
  for (const auto& [name, value] : fields) {
    if (!py::hasattr(attributes, name)) {
      throw py::type_error("fastcoll.Options: no field is named '" + name.cast<std::string>() +
                           "'. help(fastcoll.Options) lists them.");
    }
    py::setattr(attributes, name, value);
  }
  return options;
}

/// Binds the settings of a group as fields of its options.
void bindSettings(py::class_<Options, c10d::Backend::Options, Ref<Options>>& options) {
  Settings::each([&options](const Setting& setting, auto field) {
    if (!setting.ofGroup) return;
    using Value = std::decay_t<decltype(Settings{}.*field)>;
    const std::string name = setting.option();
    options.def_property(
        name.c_str(), [field](const Options& o) { return o.settings.*field; },
        [field, setting, name](Options& o, const Value& value) {
          const std::string text = concat(value);
          const std::string given = concat("fastcoll.Options: ", name, "=", text);
          translated([&] { setting.parse(given, text, o.settings.*field); });
        });
  });
}

py::object pools(const char* name) {
  return py::module_::import("fastcoll.cuda.memory_pools").attr(name);
}

/// Copies the fields of an object like torch's NCCLConfig.
void setConfig(Options& options, const py::object& given) {
  const auto type = py::module_::import("fastcoll.cuda.nccl_config").attr("NcclConfig");
  options.config = heldByPython(type(given));
}

py::object configOf(Options& options) {
  if (options.config == nullptr) setConfig(options, py::none());
  return *static_cast<py::object*>(options.config.get());
}

Ref<Options> copyOf(const Options& options) {
  auto copy = c10::make_intrusive<Options>(options);
  if (copy->config != nullptr) setConfig(*copy, configOf(*copy));
  return copy;
}

// Waits call this between slices on the main thread, so KeyboardInterrupt leaves through them.
void checkSignals() {
  if (Py_IsInitialized() == 0) return;
  py::gil_scoped_acquire gil;
  if (PyErr_CheckSignals() != 0) throw py::error_already_set();
}

void setGlooFactory(py::object factory) {
  GlooNetwork::setFactory([&make = keptByPython(std::move(factory))]() -> GlooNetwork::Maker {
    // Its error is reported to the other ranks.
    auto made = inPython([&make] { return heldByPython(make()); });
    return [maker = std::move(made)](const Ref<c10d::Store>& store, int rank, int size,
                                     std::chrono::milliseconds timeout) {
      py::gil_scoped_acquire gil;
      try {
        return (*maker)(store, rank, size, timeout).cast<Ref<c10d::Backend>>();
      } catch (const py::error_already_set& error) {
        throw Error(ErrorKind::Backend,
                    std::string("fastcoll: Gloo could not connect the ranks: ") + error.what());
      }
    };
  });
}

template <typename Opts>
Opts optionsOf(c10d::ReduceOp op, bool async) {
  Opts opts;
  opts.reduceOp = std::move(op);
  opts.asyncOp = async;
  return opts;
}

py::list groups() {
  py::list all;
  for (const auto& engine : registryOf<CpuEngine>().all()) {
    const auto info = engine->info();
    py::dict entry;
    entry["name"] = engine->config().name;
    entry["rank"] = engine->config().rank;
    entry["size"] = engine->config().size;
    entry["transport"] = info.transport;
    entry["reason"] = info.reason;
    if (!info.stores.empty()) {
      entry["stores"] = info.stores;
      entry["spin_us"] = info.spinMicros;
    }
    entry["shared_bytes"] = info.sharedBytes;
    all.append(entry);
  }
  return all;
}

}  // namespace

PYBIND11_MODULE(_C, m) {
  py::module_::import("torch._C._distributed_c10d");  // registers the base classes
  makeFirstError();

  py::class_<TuningTable> tuning(m, "Tuning");
  tuning.def(py::init<>());
  TuningTable::each([&](const char* name, auto field) { tuning.def_readwrite(name, field); });

  py::class_<Options, c10d::Backend::Options, Ref<Options>> options(m, "Options");
  options.def(py::init(&newOptions), py::arg("timeout") = kBackendDefaultTimeout)
      .def_property(
          "timeout", [](const Options& o) { return o.timeout; },
          [](Options& o, std::chrono::milliseconds timeout) { o.timeout = timeout; })
      .def_readwrite("tuning", &Options::tuning)
      .def_readwrite("is_high_priority_stream", &Options::highPriorityStream)
      .def_readwrite("blocking_wait", &Options::blockingWait)
      .def_property("config", &configOf, &setConfig)
      .def("__copy__", &copyOf)
      .def("__deepcopy__", [](const Options& o, const py::dict&) { return copyOf(o); });
  bindSettings(options);

  py::class_<ProcessGroupFastcoll, c10d::Backend, Ref<ProcessGroupFastcoll>>(m,
                                                                             "ProcessGroupFastcoll")
      .def(py::init([](Ref<c10d::Store> store, int rank, int size, Ref<Options> options) {
             py::gil_scoped_release nogil;  // the store may be slow, or written in Python
             return c10::make_intrusive<ProcessGroupFastcoll>(std::move(store), rank, size,
                                                              std::move(options));
           }),
           py::arg("store"), py::arg("rank"), py::arg("size"), py::arg("options"))
      .def_property_readonly("options", &ProcessGroupFastcoll::options)
      .def("transport", [](const ProcessGroupFastcoll& g) { return g.info().transport; })
      .def(
          "allocate_tensor",
          [](ProcessGroupFastcoll& g, long size, at::ScalarType dtype, const at::Device& device) {
            return g.allocateShared(size, at::TensorOptions().dtype(dtype).device(device));
          },
          py::arg("size"), py::kw_only(), py::arg("dtype"), py::arg("device"),
          py::call_guard<py::gil_scoped_release>())
      .def(
          "all_reduce_list",
          [](ProcessGroupFastcoll& g, std::vector<at::Tensor> tensors, c10d::ReduceOp op,
             bool async, std::optional<at::ScalarType> wire, double scale, std::string algorithm,
             std::optional<bool> fuse, const std::optional<at::Tensor>& squares) {
            const auto opts = optionsOf<c10d::AllreduceOptions>(std::move(op), async);
            AllReduceOptions options{std::nullopt, scale, std::move(algorithm), fuse};
            if (wire) options.wire = dtypeOf(*wire);
            if (squares) options.squares = reinterpret_cast<std::uintptr_t>(squares->data_ptr());
            const bool plain = options == AllReduceOptions{};
            return g.launch(
                &Doors::allReduceList, tensors, opts,
                plain ? nullptr : std::make_shared<AllReduceOptions>(std::move(options)), squares);
          },
          py::arg("tensors"), py::arg("op"), py::arg("async_op") = false, py::kw_only(),
          py::arg("wire_dtype") = std::nullopt, py::arg("scale") = 1.0, py::arg("algorithm") = "",
          py::arg("fuse") = std::nullopt, py::arg("squares") = std::nullopt,
          py::call_guard<py::gil_scoped_release>())
      .def(
          "all_reduce_fused",
          [](ProcessGroupFastcoll& g, const std::vector<at::Tensor>& tensors, c10d::ReduceOp op,
             std::optional<at::ScalarType> wire, std::optional<at::Tensor> squares, bool async) {
            const auto opts = optionsOf<c10d::AllreduceOptions>(std::move(op), async);
            return g.launch(&Doors::allReduceFused, tensors, opts,
                            Fusion{wire, std::move(squares)});
          },
          py::arg("tensors"), py::arg("op"), py::arg("wire_dtype") = std::nullopt,
          py::arg("squares") = std::nullopt, py::arg("async_op") = false,
          py::call_guard<py::gil_scoped_release>())
      .def(
          "reduce_scatter_fused",
          [](ProcessGroupFastcoll& g, const at::Tensor& output, const at::Tensor& input,
             c10d::ReduceOp op, std::optional<at::ScalarType> wire,
             std::optional<at::Tensor> squares, bool async) {
            const auto opts = optionsOf<c10d::ReduceScatterOptions>(std::move(op), async);
            return g.launch(&Doors::reduceScatterFused, output, input, opts,
                            Fusion{wire, std::move(squares)});
          },
          py::arg("output"), py::arg("input"), py::arg("op"), py::arg("wire_dtype") = std::nullopt,
          py::arg("squares") = std::nullopt, py::arg("async_op") = false,
          py::call_guard<py::gil_scoped_release>())
      .def("is_shared", &ProcessGroupFastcoll::isShared, py::arg("tensor"))
      .def("get_error", &ProcessGroupFastcoll::getError, py::call_guard<py::gil_scoped_release>())
      .def("comm_split_count", &ProcessGroupFastcoll::splitCount)
      .def_property_readonly("mem_allocator",
                             [](const ProcessGroupFastcoll&) { return pools("allocator")(); })
      .def(
          "register_mem_pool",
          [](ProcessGroupFastcoll& group, const py::object& pool, bool symmetric) {
            pools("register")(group.options()->group_name, pool, symmetric);
          },
          py::arg("pool"), py::arg("symm") = false)
      .def(
          "deregister_mem_pool",
          [](ProcessGroupFastcoll& group, const py::object& pool) {
            pools("deregister")(group.options()->group_name, pool);
          },
          py::arg("pool"))
      // A rank outside a split has nothing to do, because no communicator needs it.
      .def("perform_nocolor_split", [](ProcessGroupFastcoll&, const py::object&) {})
      .def("_set_default_timeout", &ProcessGroupFastcoll::setTimeout,
           py::call_guard<py::gil_scoped_release>());

  m.def("set_gloo_factory", &setGlooFactory, py::arg("factory"));
  m.def(
      "set_device_loader",  // `load` imports fastcoll._cuda
      [](py::object load) {
        setDeviceLoader([&load = keptByPython(std::move(load))] { inPython([&load] { load(); }); });
      },
      py::arg("load"));
  m.def("groups", &groups);
  m.def("reduce_isa", &reduceIsa);
  m.def(
      "digest",
      [](const at::Tensor& tensor) {
        TORCH_CHECK(tensor.is_cpu() && tensor.is_contiguous(),
                    "fastcoll: expected a contiguous CPU tensor");
        return digestOf(0, tensor.const_data_ptr(), tensor.nbytes());
      },
      py::arg("tensor"));
  m.def("build_info", [] {
    py::dict info;
    info["fastcoll"] = FASTCOLL_VERSION;
    info["torch"] = FASTCOLL_TORCH_VERSION;
    info["compiler"] = __VERSION__;
    info["cplusplus"] = std::to_string(__cplusplus);
    return info;
  });
  m.def(
      "select_host_broadcast",
      [](int hosts, std::size_t bytes, std::size_t linkBytes) {
        constexpr const char* kNames[] = {"flat", "scatter_all_gather", "chain"};
        return kNames[static_cast<int>(selectHostBroadcast(hosts, bytes, linkBytes))];
      },
      py::arg("hosts"), py::arg("bytes"), py::arg("link_bytes"));
  m.def("reduces_in_one_step", &reducesInOneStep, py::arg("hosts"), py::arg("partial"),
        py::arg("result"), py::arg("link_bytes"));
  m.def("_shutdown_all", &ProcessGroupFastcoll::shutdownAll,
        py::call_guard<py::gil_scoped_release>());

  setInterruptCheck(&checkSignals);
  setComputeThreads(&at::get_num_threads);
  py::module_::import("atexit").attr("register")(m.attr("_shutdown_all"));
  bindCommunicator(m);
  bindTrace(m);
}
