// One source for every supported torch. A method that a release added to torch's classes is an
// override there, and an ordinary member before.
#pragma once

#include <torch/headeronly/version.h>

#if TORCH_VERSION_MAJOR > 2 || TORCH_VERSION_MINOR >= 14
#define FASTCOLL_OVERRIDES_2_14 override
#else
#define FASTCOLL_OVERRIDES_2_14
#endif
