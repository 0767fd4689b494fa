// Lets a wait in C++ detect Ctrl-C without a dependency on Python. The bindings install a check
// that throws when the interpreter has a signal to deliver.
#pragma once

#include "base/exported.hpp"

namespace fastcoll {

using InterruptCheck = void (*)();

/// Installs the check (nullptr: none). Called once when the extension is imported.
void setInterruptCheck(InterruptCheck check);

/// Runs the check if the calling thread is the process's main thread; may throw.
FASTCOLL_EXPORTED void checkInterrupt();

/// Whether checkInterrupt() threw on this thread since the last call of this function.
bool wasInterrupted();

}  // namespace fastcoll
