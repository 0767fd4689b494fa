#pragma once

#include <pybind11/pybind11.h>

namespace fastcoll {

/// Adds the roster, by which the ranks of a device group come together, to fastcoll._C.
void bindRoster(pybind11::module_& m);

}  // namespace fastcoll
