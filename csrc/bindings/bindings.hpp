// The parts of fastcoll._C that have files of their own.
#pragma once

#include <pybind11/pybind11.h>

namespace fastcoll {

/// The calls of a group straight from Python, and plans.
void bindCommunicator(pybind11::module_& m);
/// The trace.
void bindTrace(pybind11::module_& m);

}  // namespace fastcoll
