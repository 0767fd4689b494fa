// The parts of fastcoll._cuda that have files of their own.
#pragma once

#include <pybind11/pybind11.h>

namespace fastcoll {

/// The roster, through which the ranks of a device group meet.
void bindRoster(pybind11::module_& m);
/// torch's symmetric memory, without the GIL.
void bindSymmetricMemory(pybind11::module_& m);

}  // namespace fastcoll
