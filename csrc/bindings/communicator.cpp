// fastcoll._C.Communicator: the calls of a group, made straight from Python without torch's Python
// code and dispatcher. Each is one C call (METH_FASTCALL). CommunicatorPlan: a call that is
// prepared for repetition, like the persistent collectives of MPI 4.0. fastcoll/_C.pyi documents
// both.
#include <c10/util/ScopeExit.h>
#include <torch/csrc/Exceptions.h>
#include <torch/csrc/utils/pybind.h>

#include <structmember.h>  // after Python.h

#include <functional>
#include <utility>

#include "base/entry_lock.hpp"
#include "bindings/communicator_calls.hpp"
#include "bindings/python.hpp"
#include "process_group.hpp"

namespace py = pybind11;

namespace fastcoll::direct {
namespace {

using Group = c10::intrusive_ptr<ProcessGroupFastcoll>;

/// Keeps the GIL in its scope until the thread waits.
class GilUntilWait final : public EntryLock {
 public:
  ~GilUntilWait() override {
    if (state_ != nullptr) PyEval_RestoreThread(state_);
  }
  bool release() override {
    if (PyGILState_Check() == 0) return false;
    state_ = PyEval_SaveThread();
    return true;
  }

 private:
  PyThreadState* state_ = nullptr;
};

/// A weak reference to a group. It keeps no memory and no thread of an ended group.
struct Member {
  explicit Member(const Group& group)
      : weak(group), name(group->name()), rank(group->getRank()), size(group->getSize()) {}
  /// Returns the group; throws if it has ended. Release it without the GIL, because the last
  /// reference may wait for threads.
  Group group(const char* call) const {
    Group found = weak.lock();
    if (found == nullptr) {
      throwAsTorch(
          Error(ErrorKind::Backend, errorSite(call, *this), "the group was destroyed", kInitAgain));
    }
    return found;
  }

  c10::weak_intrusive_ptr<ProcessGroupFastcoll> weak;
  std::string name;
  int rank;
  int size;
};

void await(const WorkRef& work) {
  if (work == nullptr) return;
  beforeWait();
  work->wait();
}

/// Calls `body`, and translates its exception into one of Python.
template <typename Body>
PyObject* raising(Body body) {
  try {
    return body();
  } catch (py::error_already_set& error) {
    error.restore();
  } catch (py::builtin_exception& error) {
    error.set_error();
  } catch (python_error& error) {
    error.restore();
  } catch (...) {
    torch::translate_exception_to_python(std::current_exception());
  }
  return nullptr;
}

// --- plans ---------------------------------------------------------------------------------------

/// The contents of a plan object of Python, which owns them.
struct Planned {
  Planned(const Member& of, const char* name) : member(of), call(name) {}

  const Member member;
  const char* const call;
  std::function<Calls(const Doors&)> check;
  std::shared_ptr<Plan> plan;  // nullptr: check() makes the call anew
  bool runs = false;           // under the GIL
};

struct PlanObject {
  PyObject base;
  vectorcallfunc call;
  Planned* planned;
};

PyTypeObject* planType = nullptr;

PyObject* runPlan(PyObject* self, PyObject* const* /*arguments*/, std::size_t count,
                  PyObject* keywords) {
  return raising([&]() -> PyObject* {
    if (PyVectorcall_NARGS(count) != 0 || keywords != nullptr) {
      throw py::type_error("fastcoll.CommunicatorPlan: expected no arguments");
    }
    Planned& planned = *reinterpret_cast<PlanObject*>(self)->planned;
    if (std::exchange(planned.runs, true)) {
      throw py::value_error(
          "fastcoll.CommunicatorPlan: it runs on another thread. Make a plan for each.");
    }
    const auto ends = c10::make_scope_exit([&planned] { planned.runs = false; });
    {
      const GilUntilWait gil;
      const Group group = planned.member.group(planned.call);
      if (planned.plan != nullptr && group->canRepeat(*planned.plan)) {
        try {
          group->repeat(*planned.plan);
        } catch (...) {
          planned.plan = nullptr;
          throw;
        }
      } else {
        await(group->run(planned.check));
      }
    }
    Py_RETURN_NONE;
  });
}

// --- the communicator ----------------------------------------------------------------------------

struct CommunicatorObject {
  PyObject base;
  Member* member;
  int rank, size;
};

const Member& memberOf(PyObject* self) {
  return *reinterpret_cast<CommunicatorObject*>(self)->member;
}

template <const auto& kCall>
auto argumentsOf(PyObject* const* given, Py_ssize_t count, PyObject* keywords) {
  return Arguments(kCall.name, kCall.arguments, kCall.required, given, count, keywords);
}

template <const auto& kCall>
PyObject* callNow(PyObject* self, PyObject* const* given, Py_ssize_t count, PyObject* keywords) {
  return raising([&]() -> PyObject* {
    auto call = kCall.bind(argumentsOf<kCall>(given, count, keywords));
    {
      const GilUntilWait gil;
      const Group group = memberOf(self).group(kCall.name);
      await(group->run(call));
    }
    Py_RETURN_NONE;
  });
}

template <const auto& kCall>
PyObject* makePlan(PyObject* self, PyObject* const* given, Py_ssize_t count, PyObject* keywords) {
  return raising([&]() -> PyObject* {
    auto planned = std::make_unique<Planned>(memberOf(self), kCall.name);
    const auto arguments = argumentsOf<kCall>(given, count, keywords);
    if constexpr (&kCall == static_cast<const void*>(&kAllReduce)) {
      if (tensorOf(arguments[0]).layout() != at::kStrided) {
        throw py::value_error(
            "fastcoll.all_reduce_plan: expected a dense tensor, got a sparse one");
      }
    }
    planned->check = kCall.bind(arguments);
    {
      const py::gil_scoped_release nogil;
      const Group group = planned->member.group(kCall.name);
      planned->plan = group->plan(planned->check);
    }
    PyObject* const plan = planType->tp_alloc(planType, 0);
    if (plan == nullptr) return nullptr;
    auto* const object = reinterpret_cast<PlanObject*>(plan);
    object->call = &runPlan;
    object->planned = planned.release();
    return plan;
  });
}

PyObject* newCommunicator(PyTypeObject* type, PyObject* arguments, PyObject* keywords) {
  return raising([&]() -> PyObject* {
    if (PyTuple_GET_SIZE(arguments) != 1 || keywords != nullptr) {
      throw py::type_error("fastcoll.Communicator: expected one argument, a backend of fastcoll");
    }
    const py::handle backend(PyTuple_GET_ITEM(arguments, 0));
    if (!py::isinstance<ProcessGroupFastcoll>(backend)) {
      throw py::type_error(concat("fastcoll.Communicator: expected a backend of fastcoll, got ",
                                  Py_TYPE(backend.ptr())->tp_name));
    }
    const auto group = py::cast<Group>(backend);
    PyObject* const self = type->tp_alloc(type, 0);
    if (self == nullptr) return nullptr;
    auto& made = *reinterpret_cast<CommunicatorObject*>(self);
    made.member = new Member(group);
    made.rank = made.member->rank;
    made.size = made.member->size;
    return self;
  });
}

/// Frees an object of Python and the contents that it owns.
template <typename Object, auto kContents>
void freeObject(PyObject* self) {
  PyTypeObject* const type = Py_TYPE(self);
  delete (reinterpret_cast<Object*>(self)->*kContents);
  type->tp_free(self);
  Py_DECREF(type);
}

/// A call, or the method `name` that makes its plan.
template <auto kMethod>
PyMethodDef method(const char* name) {
  return {name, reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(kMethod)),
          METH_FASTCALL | METH_KEYWORDS, nullptr};
}
#define METHODS(call, name) method<&callNow<call>>(name), method<&makePlan<call>>(name "_plan")

PyMethodDef communicatorMethods[] = {
    METHODS(kAllReduce, "all_reduce"),
    METHODS(kReduce, "reduce"),
    METHODS(kBroadcast, "broadcast"),
    METHODS(kAllGather, "all_gather"),
    METHODS(kReduceScatter, "reduce_scatter"),
    METHODS(kAllToAll, "all_to_all"),
    METHODS(kGather, "gather"),
    METHODS(kScatter, "scatter"),
    METHODS(kBarrier, "barrier"),
    METHODS(kSend, "send"),
    METHODS(kRecv, "recv"),
    METHODS(kSendRecv, "sendrecv"),
    {nullptr, nullptr, 0, nullptr},
};
#undef METHODS

PyMemberDef communicatorMembers[] = {
    {"rank", T_INT, offsetof(CommunicatorObject, rank), READONLY, nullptr},
    {"size", T_INT, offsetof(CommunicatorObject, size), READONLY, nullptr},
    {nullptr, 0, 0, 0, nullptr},
};

PyType_Slot communicatorSlots[] = {
    {Py_tp_new, reinterpret_cast<void*>(&newCommunicator)},
    {Py_tp_dealloc,
     reinterpret_cast<void*>(&freeObject<CommunicatorObject, &CommunicatorObject::member>)},
    {Py_tp_methods, communicatorMethods},
    {Py_tp_members, communicatorMembers},
    {0, nullptr},
};
PyType_Spec communicatorSpec = {"fastcoll._C.Communicator", sizeof(CommunicatorObject), 0,
                                Py_TPFLAGS_DEFAULT | Py_TPFLAGS_BASETYPE, communicatorSlots};

PyMemberDef planMembers[] = {
    {"__vectorcalloffset__", T_PYSSIZET, offsetof(PlanObject, call), READONLY, nullptr},
    {nullptr, 0, 0, 0, nullptr},
};
PyType_Slot planSlots[] = {
    {Py_tp_dealloc, reinterpret_cast<void*>(&freeObject<PlanObject, &PlanObject::planned>)},
    {Py_tp_call, reinterpret_cast<void*>(&PyVectorcall_Call)},
    {Py_tp_members, planMembers},
    {0, nullptr},
};
PyType_Spec planSpec = {
    "fastcoll._C.CommunicatorPlan", sizeof(PlanObject), 0,
    Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_VECTORCALL | Py_TPFLAGS_DISALLOW_INSTANTIATION, planSlots};

py::object typeOf(PyType_Spec& spec) {
  PyObject* const type = PyType_FromSpec(&spec);
  if (type == nullptr) throw py::error_already_set();
  return py::reinterpret_steal<py::object>(type);
}

}  // namespace
}  // namespace fastcoll::direct

namespace fastcoll {

void bindCommunicator(py::module_& m) {
  using namespace direct;
  const auto ops = py::module_::import("torch._C._distributed_c10d").attr("ReduceOp");
  for (const char* name : {"SUM", "AVG", "PRODUCT", "MIN", "MAX", "BAND", "BOR", "BXOR"}) {
    py::object op = ops.attr("RedOpType").attr(name);
    const auto type = py::cast<c10d::ReduceOp::RedOpType>(op);
    knownOps().emplace_back(op.release().ptr(), type);
  }
  m.attr("Communicator") = typeOf(communicatorSpec);
  const py::object plan = typeOf(planSpec);
  planType = reinterpret_cast<PyTypeObject*>(plan.ptr());
  m.attr("CommunicatorPlan") = plan;
}

}  // namespace fastcoll
