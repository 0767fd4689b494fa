// Marks what the module fastcoll._cuda uses of fastcoll._C. All else of _C is hidden.
#pragma once

#define FASTCOLL_EXPORTED __attribute__((visibility("default")))
