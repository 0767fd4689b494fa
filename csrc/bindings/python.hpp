// C++ that holds and calls Python, and the parts of fastcoll._C that have files of their own.
#pragma once

#include <pybind11/pybind11.h>

#include <memory>
#include <utility>

#include "base/error.hpp"

namespace fastcoll {

/// The calls of a group straight from Python, and plans.
void bindCommunicator(pybind11::module_& m);
/// The trace.
void bindTrace(pybind11::module_& m);

/// A reference to a Python object that any thread may drop.
inline std::shared_ptr<pybind11::object> heldByPython(pybind11::object object) {
  return {new pybind11::object(std::move(object)), [](pybind11::object* held) {
            if (Py_IsInitialized() == 0) return;  // nothing can free it
            const pybind11::gil_scoped_acquire gil;
            delete held;
          }};
}

/// A reference that is never dropped: the interpreter may be gone when static destructors run.
inline pybind11::object& keptByPython(pybind11::object object) {
  return *new pybind11::object(std::move(object));
}

/// Calls `body` with the GIL. A Python exception becomes an error of the engine. What is no
/// Exception (the user has ended the program) is rethrown as it is.
template <typename Body>
auto inPython(Body&& body) {
  const pybind11::gil_scoped_acquire gil;
  try {
    return body();
  } catch (const pybind11::error_already_set& error) {
    if (!error.matches(PyExc_Exception)) throw;
    const ErrorKind kind = error.matches(PyExc_ValueError)  ? ErrorKind::Value
                           : error.matches(PyExc_TypeError) ? ErrorKind::Type
                                                            : ErrorKind::Backend;
    throw Error(kind, pybind11::str(error.value()).cast<std::string>());
  }
}

}  // namespace fastcoll
