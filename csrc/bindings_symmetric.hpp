#pragma once

#include <pybind11/pybind11.h>

namespace fastcoll {

/// Adds torch's symmetric memory, without the GIL, to fastcoll._C.
void bindSymmetricMemory(pybind11::module_& m);

}  // namespace fastcoll
