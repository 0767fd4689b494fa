// The trace, as Python sees it in fastcoll._C.
#pragma once

#include <pybind11/pybind11.h>

namespace fastcoll {

void bindTrace(pybind11::module_& m);

}  // namespace fastcoll
