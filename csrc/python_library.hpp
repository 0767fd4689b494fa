// The library of the device engine, behind a Python object.
#pragma once

#include <pybind11/pybind11.h>

namespace fastcoll {

namespace py = pybind11;

/// Sets the function that makes the Python object of a group, fastcoll.cuda.engine.
void setDeviceFactory(py::object factory);

}  // namespace fastcoll
