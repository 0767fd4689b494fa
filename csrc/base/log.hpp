// Lines on standard error, as FASTCOLL_DEBUG asks for them.
#pragma once

#include <string>

namespace fastcoll {

enum class LogLevel { Off = 0, Warn = 1, Info = 2, Trace = 3 };

/// FASTCOLL_DEBUG as it is now; never throws (a bad value counts as Warn).
LogLevel logLevel();

/// Writes "[fastcoll] text" to standard error in one call if `level` is switched on.
void log(LogLevel level, const std::string& text);

}  // namespace fastcoll
