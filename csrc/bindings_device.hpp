#pragma once

#include <pybind11/pybind11.h>

namespace fastcoll {

/// Adds the device engine's part to fastcoll._C.
void bindDevice(pybind11::module_& m);

}  // namespace fastcoll
