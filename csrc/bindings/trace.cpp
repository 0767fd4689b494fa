
#include <torch/csrc/utils/pybind.h>

#include <string>

#include "bindings/python.hpp"
#include "torch/error.hpp"
#include "trace/trace.hpp"

namespace py = pybind11;

namespace fastcoll {
namespace {

constexpr int kFrames = 64;

std::string textOf(PyObject* value) {
  const char* text = PyUnicode_Check(value) ? PyUnicode_AsUTF8(value) : nullptr;
  if (text == nullptr) PyErr_Clear();
  return text == nullptr ? "?" : text;
}

/// The Python stack of this thread, innermost frame first; "" for a thread without one.
std::string readStack() {
  if (Py_IsInitialized() == 0) return "";
  py::gil_scoped_acquire gil;
  std::string stack;
  PyFrameObject* frame = PyEval_GetFrame();
  Py_XINCREF(frame);
  for (int depth = 0; frame != nullptr && depth < kFrames; ++depth) {
    PyCodeObject* const code = PyFrame_GetCode(frame);
    stack += concat(textOf(code->co_name), "\t", textOf(code->co_filename), "\t",
                    PyFrame_GetLineNumber(frame), "\n");
    Py_DECREF(code);
    PyFrameObject* const back = PyFrame_GetBack(frame);
    Py_DECREF(frame);
    frame = back;
  }
  Py_XDECREF(frame);
  return stack;
}

}  // namespace

void bindTrace(py::module_& m) {
  m.def(
      "trace_dump",
      [](const std::string& reason) {
        std::string bytes;
        {
          py::gil_scoped_release nogil;
          bytes = trace::dump(reason);
        }
        return py::bytes(bytes);
      },
      py::arg("reason"));
  m.def(
      "trace_write",
      [](const std::string& reason, const std::string& path) {
        return translated([&] { return trace::write(reason, path); });
      },
      py::arg("reason"), py::arg("path") = "", py::call_guard<py::gil_scoped_release>());
  trace::setStackReader(&readStack);
}

}  // namespace fastcoll
