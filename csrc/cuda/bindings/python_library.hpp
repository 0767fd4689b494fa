// The library of the device engine, behind a Python object.
#pragma once

#include <pybind11/pybind11.h>

#include <memory>

#include "cuda/kernel.hpp"

namespace fastcoll {

namespace py = pybind11;

/// A kernel that is a function on the host; it takes the number of programs and the arguments.
std::shared_ptr<Kernel> interpretedKernel(const py::object& function);

/// Sets the function that makes the Python object of a group, fastcoll.cuda.engine.
void setDeviceFactory(py::object factory);

}  // namespace fastcoll
