#include <pybind11/pybind11.h>
#include <pybind11/stl.h>
#include <torch/csrc/utils/pybind.h>

#include <sstream>

#include "current.hpp"
#include "launch.hpp"
#include "recorder.hpp"
#include "symmetric.hpp"

namespace py = pybind11;
using namespace recording;  // NOLINT: the module is this namespace, seen from Python

namespace {

StreamIndex known(int device, int64_t id) {
  if (device < 0 || device >= kDevices || id < 0 || id >= kStreamsPerDevice) {
    throw py::value_error("no such stream");
  }
  return streamIndex(device, id);
}

std::string describe(const LogEntry& entry) {
  std::ostringstream text;
  text << entry.kind << (entry.what.empty() ? "" : " ") << entry.what << " on " << entry.stream;
  if (entry.event != 0) text << ", event " << entry.event;
  text << ", thread " << entry.thread;
  return text.str();
}

}  // namespace

PYBIND11_MODULE(TORCH_EXTENSION_NAME, module) {
  // A thread that waits for a held stream must not keep others from releasing it.
  using Unlocked = py::call_guard<py::gil_scoped_release>;

  py::class_<Touch>(module, "Touch")
      .def_readonly("what", &Touch::what)
      .def_readonly("stream", &Touch::stream)
      .def_readonly("address", &Touch::address)
      .def_readonly("bytes", &Touch::bytes)
      .def_readonly("write", &Touch::write);
  py::class_<Violation>(module, "Violation")
      .def_readonly("kind", &Violation::kind)
      .def_readonly("text", &Violation::text)
      .def_readonly("first", &Violation::first)
      .def_readonly("second", &Violation::second)
      .def("__repr__", [](const Violation& v) { return v.kind + ": " + v.text; });
  py::class_<LogEntry>(module, "LogEntry")
      .def_readonly("kind", &LogEntry::kind)
      .def_readonly("what", &LogEntry::what)
      .def_readonly("stream", &LogEntry::stream)
      .def_readonly("event", &LogEntry::event)
      .def_readonly("thread", &LogEntry::thread)
      .def_readonly("touches", &LogEntry::touches)
      .def("__repr__", &describe);

  module.def("violations", [] { return Recorder::get().violations(); });
  module.def("log", [] { return Recorder::get().log(); });
  module.def("clear", [] { Recorder::get().clear(); }, Unlocked());
  module.def(
      "hold", [](int device, int64_t id) { return Recorder::get().hold(known(device, id)); },
      Unlocked());
  module.def("release", [](uint64_t hold) { Recorder::get().release(hold); }, Unlocked());
  module.def("set_quiet", [](bool quiet) { Recorder::get().setQuiet(quiet); });
  module.def("share_with_workers", [] { Recorder::get().shareWithWorkers(); });
  module.def("join_threads", [] { Recorder::get().joinThreads(); });
  module.def("launch_at", [](int device, int64_t id, const std::string& what,
                             const std::vector<std::tuple<uintptr_t, size_t, bool>>& touched) {
    std::vector<Access> accesses;
    for (const auto& [address, bytes, write] : touched) {
      accesses.push_back({Footprint(address, address + bytes), write});
    }
    Recorder::get().launch(known(device, id), what, accesses);
  });
  module.def("name_of", [](int device, int64_t id) { return nameOf(known(device, id)); });
  module.def("cpu_view", &onCpu);
  module.def("add_symmetric_memory", &addSymmetricMemory);
  module.def("hold_rendezvous", &holdRendezvous);
  module.def("switches_seen", &switchesSeen);
  module.def("most_at_once", &mostAtOnce);
  module.attr("DEVICES") = kDevices;
}
