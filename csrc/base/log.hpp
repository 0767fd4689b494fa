// Log lines on standard error, up to the level of FASTCOLL_DEBUG.
#pragma once

#include <string>

#include "base/error.hpp"
#include "base/exported.hpp"

namespace fastcoll {

enum class LogLevel { Off = 0, Warn = 1, Info = 2, Trace = 3 };

/// The present value of FASTCOLL_DEBUG. Never throws; a bad value counts as Warn.
LogLevel logLevel();

/// Writes "[fastcoll] text" to standard error in one call if `level` is enabled.
FASTCOLL_EXPORTED void writeLog(LogLevel level, const std::string& text);
template <typename... Parts>
void log(LogLevel level, const Parts&... parts) {
  writeLog(level, concat(parts...));
}

}  // namespace fastcoll
