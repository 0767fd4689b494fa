// The calls of fastcoll._C.Communicator. Each reads its arguments from Python, and then calls the
// process group.
#pragma once

#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/utils/pybind.h>

#include <algorithm>
#include <array>
#include <string>
#include <utility>
#include <vector>

#include "process_group.hpp"

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

/// One tensor, or a list with a tensor for each rank.
struct Parts {
  Tensors tensors;
  bool list = false;
};

/// `optional`: whether None is allowed, on a rank that has no parts.
inline Parts partsOf(PyObject* value, bool optional = false) {
  Parts parts;
  if (optional && value == Py_None) return parts;
  parts.list = PyList_Check(value) || PyTuple_Check(value);
  if (!parts.list) {
    parts.tensors = {tensorOf(value)};
    return parts;
  }
  for (const py::handle item : py::reinterpret_borrow<py::sequence>(value)) {
    parts.tensors.push_back(tensorOf(item.ptr()));
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

/// A list of lists, as c10d takes the parts of one rank.
inline std::vector<Tensors> nested(const Tensors& tensors) {
  return {tensors};
}

inline at::Tensor one(const Tensors& tensors) {
  return tensors.empty() ? at::Tensor() : tensors[0];
}

// --- the calls -----------------------------------------------------------------------------------

// Each has the names of its arguments, how many are required, and issue(), which makes the call
// without the GIL. Ranks are those of the group.

struct AllReduce {
  static constexpr auto kName = "all_reduce";
  static constexpr std::array kArguments{"tensor", "op"};
  static constexpr std::size_t kRequired = 1;
  explicit AllReduce(const Arguments<2>& a) : tensors{tensorOf(a[0])}, op(opOf(a, 1)) {}
  WorkRef issue(ProcessGroupFastcoll& group) {
    c10d::AllreduceOptions options;
    options.reduceOp = op;
    options.asyncOp = false;
    return group.allreduce(tensors, options);
  }
  Tensors tensors;
  c10d::ReduceOp op;
};

struct Reduce {
  static constexpr auto kName = "reduce";
  static constexpr std::array kArguments{"tensor", "dst", "op"};
  static constexpr std::size_t kRequired = 2;
  explicit Reduce(const Arguments<3>& a)
      : tensors{tensorOf(a[0])}, root(a.integer(1)), op(opOf(a, 2)) {}
  WorkRef issue(ProcessGroupFastcoll& group) {
    c10d::ReduceOptions options;
    options.reduceOp = op;
    options.rootRank = root;
    options.asyncOp = false;
    return group.reduce(tensors, options);
  }
  Tensors tensors;
  int root;
  c10d::ReduceOp op;
};

struct Broadcast {
  static constexpr auto kName = "broadcast";
  static constexpr std::array kArguments{"tensor", "src"};
  static constexpr std::size_t kRequired = 2;
  explicit Broadcast(const Arguments<2>& a) : tensors{tensorOf(a[0])}, root(a.integer(1)) {}
  WorkRef issue(ProcessGroupFastcoll& group) {
    c10d::BroadcastOptions options;
    options.rootRank = root;
    options.asyncOp = false;
    return group.broadcast(tensors, options);
  }
  Tensors tensors;
  int root;
};

struct AllGather {
  static constexpr auto kName = "all_gather";
  static constexpr std::array kArguments{"output", "input"};
  static constexpr std::size_t kRequired = 2;
  explicit AllGather(const Arguments<2>& a) : output(partsOf(a[0])), input{tensorOf(a[1])} {}
  WorkRef issue(ProcessGroupFastcoll& group) {
    c10d::AllgatherOptions options;
    options.asyncOp = false;
    if (!output.list) {
      at::Tensor whole = one(output.tensors);
      return group._allgather_base(whole, input[0], options);
    }
    auto lists = nested(output.tensors);
    return group.allgather(lists, input, options);
  }
  Parts output;
  Tensors input;
};

struct ReduceScatter {
  static constexpr auto kName = "reduce_scatter";
  static constexpr std::array kArguments{"output", "input", "op"};
  static constexpr std::size_t kRequired = 2;
  explicit ReduceScatter(const Arguments<3>& a)
      : output{tensorOf(a[0])}, input(partsOf(a[1])), op(opOf(a, 2)) {}
  WorkRef issue(ProcessGroupFastcoll& group) {
    c10d::ReduceScatterOptions options;
    options.reduceOp = op;
    options.asyncOp = false;
    if (!input.list) {
      at::Tensor whole = one(input.tensors);
      return group._reduce_scatter_base(output[0], whole, options);
    }
    auto lists = nested(input.tensors);
    return group.reduce_scatter(output, lists, options);
  }
  Tensors output;
  Parts input;
  c10d::ReduceOp op;
};

struct AllToAll {
  static constexpr auto kName = "all_to_all";
  static constexpr std::array kArguments{"output", "input", "output_splits", "input_splits"};
  static constexpr std::size_t kRequired = 2;
  explicit AllToAll(const Arguments<4>& a)
      : output(partsOf(a[0])),
        input(partsOf(a[1])),
        outputSplits(a.splits(2)),
        inputSplits(a.splits(3)) {
    if (output.list != input.list) {
      throw py::type_error(
          "fastcoll.all_to_all: expected two tensors or two lists of tensors, got one of each");
    }
  }
  WorkRef issue(ProcessGroupFastcoll& group) {
    c10d::AllToAllOptions options;
    options.asyncOp = false;
    if (output.list) return group.alltoall(output.tensors, input.tensors, options);
    at::Tensor into = one(output.tensors);
    at::Tensor from = one(input.tensors);
    return group.alltoall_base(into, from, outputSplits, inputSplits, options);
  }
  Parts output;
  Parts input;
  std::vector<std::int64_t> outputSplits;
  std::vector<std::int64_t> inputSplits;
};

struct Gather {
  static constexpr auto kName = "gather";
  static constexpr std::array kArguments{"output", "input", "dst"};
  static constexpr std::size_t kRequired = 3;
  explicit Gather(const Arguments<3>& a)
      : output(partsOf(a[0], true)), input{tensorOf(a[1])}, root(a.integer(2)) {}
  WorkRef issue(ProcessGroupFastcoll& group) {
    c10d::GatherOptions options;
    options.rootRank = root;
    options.asyncOp = false;
    if (output.list) {
      auto lists = nested(output.tensors);
      return group.gather(lists, input, options);
    }
    at::Tensor whole = one(output.tensors);
    return group.gather_single(whole, input[0], options);
  }
  Parts output;
  Tensors input;
  int root;
};

struct Scatter {
  static constexpr auto kName = "scatter";
  static constexpr std::array kArguments{"output", "input", "src"};
  static constexpr std::size_t kRequired = 3;
  explicit Scatter(const Arguments<3>& a)
      : output{tensorOf(a[0])}, input(partsOf(a[1], true)), root(a.integer(2)) {}
  WorkRef issue(ProcessGroupFastcoll& group) {
    c10d::ScatterOptions options;
    options.rootRank = root;
    options.asyncOp = false;
    if (input.list) {
      auto lists = nested(input.tensors);
      return group.scatter(output, lists, options);
    }
    return group.scatterSingle(output[0], one(input.tensors), options);
  }
  Tensors output;
  Parts input;
  int root;
};

struct Barrier {
  static constexpr auto kName = "barrier";
  static constexpr std::array<const char*, 0> kArguments{};
  static constexpr std::size_t kRequired = 0;
  explicit Barrier(const Arguments<0>&) {}
  WorkRef issue(ProcessGroupFastcoll& group) {
    c10d::BarrierOptions options;
    options.asyncOp = false;
    return group.barrier(options);
  }
};

struct Send {
  static constexpr auto kName = "send";
  static constexpr std::array kArguments{"tensor", "dst", "tag"};
  static constexpr std::size_t kRequired = 2;
  explicit Send(const Arguments<3>& a)
      : tensors{tensorOf(a[0])}, peer(a.integer(1)), tag(a.integerOr(2, 0)) {}
  WorkRef issue(ProcessGroupFastcoll& group) { return group.send(tensors, peer, tag); }
  Tensors tensors;
  int peer;
  int tag;
};

struct Recv {
  static constexpr auto kName = "recv";
  static constexpr std::array kArguments{"tensor", "src", "tag"};
  static constexpr std::size_t kRequired = 2;
  explicit Recv(const Arguments<3>& a)
      : tensors{tensorOf(a[0])}, peer(a.integer(1)), tag(a.integerOr(2, 0)) {}
  WorkRef issue(ProcessGroupFastcoll& group) { return group.recv(tensors, peer, tag); }
  Tensors tensors;
  int peer;
  int tag;
};

/// Sends a message to one rank while it receives one from another.
struct SendRecv {
  static constexpr auto kName = "sendrecv";
  static constexpr std::array kArguments{"send", "dst", "recv", "src", "tag"};
  static constexpr std::size_t kRequired = 4;
  explicit SendRecv(const Arguments<5>& a)
      : sent{tensorOf(a[0])},
        received{tensorOf(a[2])},
        target(a.integer(1)),
        source(a.integer(3)),
        tag(a.integerOr(4, 0)) {}
  WorkRef issue(ProcessGroupFastcoll& group) {
    return group.sendrecv(sent, target, received, source, tag);
  }
  Tensors sent;
  Tensors received;
  int target;
  int source;
  int tag;
};

}  // namespace fastcoll::direct
