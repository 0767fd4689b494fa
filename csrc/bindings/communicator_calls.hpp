// The calls of fastcoll._C.Communicator. Each reads its arguments from Python, and has the group's
// doors check them.
#pragma once

#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/utils/pybind.h>

#include <algorithm>
#include <array>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "calls/doors.hpp"

namespace fastcoll::direct {

namespace py = pybind11;

// --- arguments -----------------------------------------------------------------------------------

/// The arguments of a call, by position. An argument that was not given is nullptr.
template <std::size_t N>
class Arguments {
 public:
  Arguments(const char* call, const std::array<const char*, N>& names, std::size_t required,
            PyObject* const* given, Py_ssize_t positional, PyObject* keywords)
      : call_(call), names_(names) {
    if (static_cast<std::size_t>(positional) > N) {
      throw py::type_error(
          concat("fastcoll.", call, ": expected ", N, " arguments at most, got ", positional));
    }
    std::copy(given, given + positional, values.begin());
    const Py_ssize_t named = keywords == nullptr ? 0 : PyTuple_GET_SIZE(keywords);
    for (Py_ssize_t i = 0; i < named; ++i) {
      PyObject* const name = PyTuple_GET_ITEM(keywords, i);
      std::size_t at = 0;
      while (at < N && PyUnicode_CompareWithASCIIString(name, names[at]) != 0) ++at;
      if (at == N || values[at] != nullptr) {
        throw py::type_error(concat("fastcoll.", call, ": ",
                                    at == N ? "unknown argument '" : "two values for argument '",
                                    py::cast<std::string>(name), "'"));
      }
      values[at] = given[positional + i];
    }
    for (std::size_t at = 0; at < required; ++at) {
      if (values[at] == nullptr) {
        throw py::type_error(concat("fastcoll.", call, ": argument '", names[at], "' is missing"));
      }
    }
  }

  PyObject* operator[](std::size_t at) const { return values[at]; }

  /// Returns the argument as a C++ type; `kind` names it in the error.
  template <typename T>
  T as(std::size_t at, const char* kind) const {
    try {
      return py::cast<T>(py::handle(values[at]));
    } catch (const py::builtin_exception&) {
      throw py::type_error(concat("fastcoll.", call_, ": expected ", kind, " for '", names_[at],
                                  "', got ", Py_TYPE(values[at])->tp_name, " ",
                                  py::cast<std::string>(py::repr(values[at]))));
    }
  }
  int integer(std::size_t at) const { return as<int>(at, "an integer of 32 bits"); }
  int integerOr(std::size_t at, int fallback) const {
    return values[at] == nullptr ? fallback : integer(at);
  }
  std::vector<std::int64_t> splits(std::size_t at) const {
    if (values[at] == nullptr || values[at] == Py_None) return {};
    return as<std::vector<std::int64_t>>(at, "a list of integers");
  }

  std::array<PyObject*, N> values{};

 private:
  const char* const call_;
  const std::array<const char*, N>& names_;
};

inline at::Tensor tensorOf(PyObject* value) {
  if (THPVariable_Check(value)) return THPVariable_Unpack(value);
  const auto convert = py::module_::import("fastcoll._communicator").attr("as_tensor");
  return py::cast<at::Tensor>(convert(py::handle(value)));
}

/// One tensor, or a list of lists with a tensor for each rank, as c10d takes it.
struct Parts {
  at::Tensor whole;
  std::vector<Tensors> lists;
  bool list() const { return !lists.empty(); }
};

/// `optional`: whether None is allowed, on a rank that has no parts.
inline Parts partsOf(PyObject* value, bool optional = false) {
  if (optional && value == Py_None) return {};
  if (!PyList_Check(value) && !PyTuple_Check(value)) return {tensorOf(value), {}};
  Parts parts;
  Tensors& list = parts.lists.emplace_back();
  for (const py::handle item : py::reinterpret_borrow<py::sequence>(value)) {
    list.push_back(tensorOf(item.ptr()));
  }
  return parts;
}

/// The operations of ReduceOp that are single Python objects, found by identity. Filled once, when
/// the module is loaded, and never freed.
inline std::vector<std::pair<PyObject*, c10d::ReduceOp::RedOpType>>& knownOps() {
  static auto* all = new std::vector<std::pair<PyObject*, c10d::ReduceOp::RedOpType>>;
  return *all;
}

template <std::size_t N>
c10d::ReduceOp opOf(const Arguments<N>& arguments, std::size_t at) {
  PyObject* const value = arguments[at];
  if (value == nullptr) return c10d::ReduceOp::SUM;
  for (const auto& [object, type] : knownOps()) {
    if (object == value) return type;
  }
  return arguments.template as<c10d::ReduceOp>(at, "an operation of torch.distributed.ReduceOp");
}

/// Options of a call that has ended when it returns.
template <typename Options>
Options synchronous() {
  Options options;
  options.asyncOp = false;
  return options;
}
template <typename Options>
Options synchronous(int root) {
  auto options = synchronous<Options>();
  options.rootRank = root;
  return options;
}

/// A function that has a door of the group check these arguments.
template <typename Door, typename... Given>
auto checks(Door door, Given&&... given) {
  // The options are copied once: they take longer than a small message.
  return [door, all = std::tuple<std::decay_t<Given>...>(std::forward<Given>(given)...)](
             const Doors& doors) mutable -> Calls {
    return std::apply([&](auto&... each) { return (doors.*door)(each...); }, all);
  };
}

// --- the calls -----------------------------------------------------------------------------------

/// The names of its arguments, how many are required, and bind(), which returns a function that
/// checks the call. It begins with the GIL, and the call frees it before it waits (GilUntilWait).
/// When a plan is made, it has no GIL. Ranks are those of the group.
template <std::size_t N, typename Bind>
struct Binding {
  const char* name;
  std::array<const char*, N> arguments;
  std::size_t required;
  Bind bind;
};

inline constexpr Binding kAllReduce{"all_reduce", std::array{"tensor", "op"}, 1, [](const auto& a) {
                                      auto options = synchronous<c10d::AllreduceOptions>();
                                      options.reduceOp = opOf(a, 1);
                                      return checks(&Doors::allReduce, Tensors{tensorOf(a[0])},
                                                    options);
                                    }};

inline constexpr Binding kReduce{"reduce", std::array{"tensor", "dst", "op"}, 2, [](const auto& a) {
                                   auto options = synchronous<c10d::ReduceOptions>(a.integer(1));
                                   options.reduceOp = opOf(a, 2);
                                   return checks(&Doors::reduce, Tensors{tensorOf(a[0])}, options);
                                 }};

inline constexpr Binding kBroadcast{
    "broadcast", std::array{"tensor", "src"}, 2, [](const auto& a) {
      const auto options = synchronous<c10d::BroadcastOptions>(a.integer(1));
      return checks(&Doors::broadcast, Tensors{tensorOf(a[0])}, options);
    }};

inline constexpr Binding kAllGather{
    "all_gather", std::array{"output", "input"}, 2, [](const auto& a) {
      return [output = partsOf(a[0]),
              input = Tensors{tensorOf(a[1])}](const Doors& doors) mutable -> Calls {
        const auto options = synchronous<c10d::AllgatherOptions>();
        return output.list() ? doors.allGather(output.lists, input, options)
                             : doors.allGatherIntoTensor(output.whole, input[0], options);
      };
    }};

inline constexpr Binding kReduceScatter{
    "reduce_scatter", std::array{"output", "input", "op"}, 2, [](const auto& a) {
      auto options = synchronous<c10d::ReduceScatterOptions>();
      options.reduceOp = opOf(a, 2);
      return [output = Tensors{tensorOf(a[0])}, input = partsOf(a[1]),
              options](const Doors& doors) mutable -> Calls {
        return input.list() ? doors.reduceScatter(output, input.lists, options)
                            : doors.reduceScatterTensor(output[0], input.whole, options);
      };
    }};

inline constexpr Binding kAllToAll{
    "all_to_all", std::array{"output", "input", "output_splits", "input_splits"}, 2,
    [](const auto& a) {
      Parts output = partsOf(a[0]), input = partsOf(a[1]);
      if (output.list() != input.list()) {
        throw py::type_error(
            "fastcoll.all_to_all: expected two tensors or two lists of tensors, got one of each");
      }
      return [output = std::move(output), input = std::move(input), received = a.splits(2),
              sent = a.splits(3)](const Doors& doors) mutable -> Calls {
        const auto options = synchronous<c10d::AllToAllOptions>();
        return output.list()
                   ? doors.allToAll(output.lists[0], input.lists[0], options)
                   : doors.allToAllSingle(output.whole, input.whole, received, sent, options);
      };
    }};

inline constexpr Binding kGather{
    "gather", std::array{"output", "input", "dst"}, 3, [](const auto& a) {
      return
          [options = synchronous<c10d::GatherOptions>(a.integer(2)), output = partsOf(a[0], true),
           input = Tensors{tensorOf(a[1])}](const Doors& doors) mutable -> Calls {
            return output.list() ? doors.gather(output.lists, input, options)
                                 : doors.gatherSingle(output.whole, input[0], options);
          };
    }};

inline constexpr Binding kScatter{
    "scatter", std::array{"output", "input", "src"}, 3, [](const auto& a) {
      return [options = synchronous<c10d::ScatterOptions>(a.integer(2)),
              output = Tensors{tensorOf(a[0])},
              input = partsOf(a[1], true)](const Doors& doors) mutable -> Calls {
        return input.list() ? doors.scatter(output, input.lists, options)
                            : doors.scatterSingle(output[0], input.whole, options);
      };
    }};

inline constexpr Binding kBarrier{
    "barrier", std::array<const char*, 0>{}, 0,
    [](const auto&) { return checks(&Doors::barrier, synchronous<c10d::BarrierOptions>()); }};

inline constexpr Binding kSend{"send", std::array{"tensor", "dst", "tag"}, 2, [](const auto& a) {
                                 return checks(&Doors::send, Tensors{tensorOf(a[0])}, a.integer(1),
                                               a.integerOr(2, 0));
                               }};

inline constexpr Binding kRecv{"recv", std::array{"tensor", "src", "tag"}, 2, [](const auto& a) {
                                 return checks(&Doors::recv, Tensors{tensorOf(a[0])}, a.integer(1),
                                               a.integerOr(2, 0));
                               }};

/// Sends a message to one rank while it receives one from another.
inline constexpr Binding kSendRecv{
    "sendrecv", std::array{"send", "dst", "recv", "src", "tag"}, 4, [](const auto& a) {
      return checks(&Doors::sendrecv, Tensors{tensorOf(a[0])}, a.integer(1),
                    Tensors{tensorOf(a[2])}, a.integer(3), a.integerOr(4, 0));
    }};

}  // namespace fastcoll::direct
