// Binds group/roster.hpp, and the fault that ranks report to each other under its id, for
// fastcoll.cuda. Waits release the GIL and call `on_poll` between two polls of the store.
#include "cuda/bindings/bindings.hpp"

#include <torch/csrc/utils/pybind.h>

#include "group/faults.hpp"
#include "group/roster.hpp"
#include "torch/error.hpp"
#include "torch/store_adapter.hpp"

namespace py = pybind11;

namespace fastcoll {
namespace {

py::list bytesOf(const Roster::Texts& texts) {
  py::list all;
  for (const std::string& text : texts) all.append(py::bytes(text));
  return all;
}

/// A roster that owns its store. Records begin with `magic` and are all as long as this rank's.
class PythonRoster {
 public:
  PythonRoster(c10::intrusive_ptr<c10d::Store> store, std::string folder, int rank, int size,
               std::string record, std::size_t magic)
      : store_(std::move(store)),
        folder_(folder),
        record_(record),
        magic_(record_.substr(0, magic)),
        roster_(store_, std::move(folder), rank, size, std::move(record)) {}

  void publish() {
    run([&] { roster_.publish(); });
  }
  py::object read(int rank) {
    std::string record;
    const bool found = run([&] { return roster_.read(rank, record); });
    return found ? py::object(py::bytes(record)) : py::none();
  }
  py::list gather(const py::object& onPoll) {
    return bytesOf(run([&] {
      const Roster::Texts& records = roster_.gather(isCurrent(), looker(onPoll));
      for (std::size_t rank = 0; rank < records.size(); ++rank) {  // rank 0 lists bad ones too
        if (!records[rank].empty()) isCurrent()(static_cast<int>(rank), records[rank]);
      }
      for (const std::string& record : records) {
        if (record.empty()) throw roster_.foreign("the list of the ranks' records");
      }
      return records;
    }));
  }
  py::object exchange(const std::string& round, const std::string& text, const py::object& onPoll,
                      bool watch) {
    int look = 0;
    const auto over = [&] { return watch && ++look % 8 == 0 && roster_.changed(isCurrent()); };
    const auto said = run([&] { return roster_.exchange(round, text, looker(onPoll), over); });
    return said ? py::object(bytesOf(*said)) : py::none();
  }
  void post(const std::string& round, const std::string& text) {
    run([&] { roster_.post(round, text); });
  }
  std::vector<int> missing(const std::string& round) {
    return run([&] { return roster_.missing(round); });
  }
  void tell(const std::string& text) {
    run([&] { writeFault(store_, faultKey(folder_ + roster_.id()), {ErrorKind::Backend, text}); });
  }
  py::object told() {
    const auto fault = run([&] { return readFault(store_, faultKey(folder_ + roster_.id())); });
    return fault ? py::object(py::str(fault->text)) : py::none();
  }
  void erase() {
    run([&] { roster_.erase(); });
  }
  std::string id() const { return roster_.id(); }

 private:
  template <typename Body>
  auto run(Body body) -> decltype(body()) {
    const py::gil_scoped_release nogil;  // the store may be slow, or written in Python
    return translated(body);
  }
  static Roster::OnPoll looker(const py::object& onPoll) {
    return [&onPoll] {
      const py::gil_scoped_acquire gil;
      onPoll();
    };
  }
  Roster::IsCurrent isCurrent() const {
    return [this](int rank, const std::string& record) {
      if (record.size() == record_.size() && record.rfind(magic_, 0) == 0) return true;
      throw roster_.foreign(concat("the record of rank ", rank));
    };
  }

  StoreAdapter store_;
  const std::string folder_, record_, magic_;
  Roster roster_;
};

}  // namespace

void bindRoster(py::module_& m) {
  py::class_<PythonRoster>(m, "Roster")
      .def(py::init<c10::intrusive_ptr<c10d::Store>, std::string, int, int, std::string,
                    std::size_t>(),
           py::arg("store"), py::arg("folder"), py::arg("rank"), py::arg("size"),
           py::arg("record") = "", py::arg("magic") = 0)
      .def("publish", &PythonRoster::publish)
      .def("read", &PythonRoster::read, py::arg("rank"))
      .def("gather", &PythonRoster::gather, py::arg("on_poll"))
      .def("exchange", &PythonRoster::exchange, py::arg("round"), py::arg("text"),
           py::arg("on_poll"), py::arg("watch") = false)
      .def("post", &PythonRoster::post, py::arg("round"), py::arg("text"))
      .def("missing", &PythonRoster::missing, py::arg("round"))
      .def("tell", &PythonRoster::tell, py::arg("text"))
      .def("told", &PythonRoster::told)
      .def("erase", &PythonRoster::erase)
      .def_property_readonly("id", &PythonRoster::id);
}

}  // namespace fastcoll
