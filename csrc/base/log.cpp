#include "base/log.hpp"

#include <strings.h>
#include <unistd.h>

#include <cstdlib>

namespace fastcoll {

LogLevel logLevel() {
  const char* text = std::getenv("FASTCOLL_DEBUG");
  if (text == nullptr) return LogLevel::Warn;
  if (::strcasecmp(text, "off") == 0) return LogLevel::Off;
  if (::strcasecmp(text, "info") == 0) return LogLevel::Info;
  if (::strcasecmp(text, "trace") == 0) return LogLevel::Trace;
  return LogLevel::Warn;
}

void writeLog(LogLevel level, const std::string& text) {
  if (level == LogLevel::Off || level > logLevel()) return;
  const std::string line = "[fastcoll] " + text + "\n";
  // One write keeps the lines of several ranks apart. If the pipe is full, the line is lost.
  [[maybe_unused]] const auto written = ::write(STDERR_FILENO, line.data(), line.size());
}

}  // namespace fastcoll
