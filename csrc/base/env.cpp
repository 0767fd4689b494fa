#include "env.hpp"

#include <signal.h>
#include <unistd.h>

#include <algorithm>
#include <cctype>
#include <cerrno>
#include <cstdlib>

#include "error.hpp"

namespace fastcoll {
namespace {

std::string lower(std::string text) {
  std::transform(text.begin(), text.end(), text.begin(),
                 [](unsigned char c) { return static_cast<char>(std::tolower(c)); });
  return text;
}

/// The variable's value in lower case, or "" when unset or empty.
std::string variable(const char* name) {
  const char* value = std::getenv(name);
  return value == nullptr ? std::string() : lower(value);
}

int signalNumber(const std::string& name) {
  if (name == "usr1") return SIGUSR1;
  if (name == "usr2") return SIGUSR2;
  if (name == "hup") return SIGHUP;
  if (name == "quit") return SIGQUIT;
  return 0;
}

[[noreturn]] void reject(const char* name, const std::string& got, const std::string& expected) {
  throw Error(ErrorKind::Value, concat("fastcoll: ", name, "=", got, ": expected ", expected,
                                       ". Correct or unset the variable."));
}

long long integer(const char* name, const std::string& text, long long low, long long high) {
  char* end = nullptr;
  errno = 0;
  const long long value = std::strtoll(text.c_str(), &end, 10);
  if (errno != 0 || end == text.c_str() || *end != '\0' || value < low || value > high) {
    reject(name, text, concat("an integer from ", low, " to ", high));
  }
  return value;
}

bool parseLevel(const std::string& text, LogLevel& level) {
  if (text == "off") {
    level = LogLevel::Off;
  } else if (text == "warn") {
    level = LogLevel::Warn;
  } else if (text == "info") {
    level = LogLevel::Info;
  } else if (text == "trace") {
    level = LogLevel::Trace;
  } else {
    return false;
  }
  return true;
}

}  // namespace

Environment Environment::read() {
  Environment env;
  LogLevel level = LogLevel::Warn;  // checked here; log() reads it itself
  if (auto text = variable("FASTCOLL_DEBUG"); !text.empty() && !parseLevel(text, level)) {
    reject("FASTCOLL_DEBUG", text, "OFF, WARN, INFO or TRACE");
  }
  if (auto text = variable("FASTCOLL_TRANSPORT"); !text.empty()) {
    if (text == "auto") {
      env.transport = TransportChoice::Auto;
    } else if (text == "shm") {
      env.transport = TransportChoice::Shm;
    } else if (text == "gloo") {
      env.transport = TransportChoice::Gloo;
    } else {
      reject("FASTCOLL_TRANSPORT", text, "auto, shm or gloo");
    }
    env.transportIsSet = true;
  }
  env.hostId = variable("FASTCOLL_HOST_ID");
  if (env.hostId.size() > 63) reject("FASTCOLL_HOST_ID", env.hostId, "63 characters at most");
  if (auto text = variable("FASTCOLL_RING_BYTES"); !text.empty()) {
    env.ringBytes = integer("FASTCOLL_RING_BYTES", text, 16 << 10, 1 << 30);
    env.ringBytesIsSet = true;
  }
  if (auto text = variable("FASTCOLL_STORES"); !text.empty()) {
    if (text == "auto") {
      env.stores = StoresChoice::Auto;
    } else if (text == "plain") {
      env.stores = StoresChoice::Plain;
    } else if (text == "streaming") {
      env.stores = StoresChoice::Streaming;
    } else {
      reject("FASTCOLL_STORES", text, "auto, plain or streaming");
    }
  }
  if (auto text = variable("FASTCOLL_LINK_SECONDS"); !text.empty()) {
    env.linkSeconds = static_cast<int>(integer("FASTCOLL_LINK_SECONDS", text, 0, 86400));
    env.linkSecondsIsSet = true;
  }
  if (auto text = variable("FASTCOLL_ERROR_HANDLING"); !text.empty()) {
    if (text != "teardown" && text != "raise") {
      reject("FASTCOLL_ERROR_HANDLING", text, "teardown or raise");
    }
    env.tearsDown = text == "teardown";
  } else if (const auto stock = variable("TORCH_NCCL_ASYNC_ERROR_HANDLING"); !stock.empty()) {
    env.tearsDown = stock != "0" && stock != "2";
  }
  if (auto text = variable("FASTCOLL_HEARTBEAT_SECONDS"); !text.empty()) {
    env.heartbeatSeconds = static_cast<int>(integer("FASTCOLL_HEARTBEAT_SECONDS", text, 0, 86400));
  } else if (variable("TORCH_NCCL_ENABLE_MONITORING") == "0") {
    env.heartbeatSeconds = 0;
  } else if (const int stock = std::atoi(variable("TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC").c_str());
             stock > 0) {
    env.heartbeatSeconds = stock;
  }
  if (auto text = variable("FASTCOLL_SPIN_US"); !text.empty()) {
    env.spinMicros = static_cast<int>(integer("FASTCOLL_SPIN_US", text, -1, 1000000));
    env.spinMicrosIsSet = true;
  }
  if (auto text = variable("FASTCOLL_ISA"); !text.empty()) {
    if (text != "auto" && text != "avx512" && text != "avx2" && text != "baseline") {
      reject("FASTCOLL_ISA", text, "auto, avx512, avx2 or baseline");
    }
    env.isa = text;
  }
  if (auto text = variable("FASTCOLL_ARENA_BYTES"); !text.empty()) {
    env.arenaBytes = integer("FASTCOLL_ARENA_BYTES", text, 16LL << 20, 1LL << 44);
  }
  if (auto text = variable("FASTCOLL_SHARED_TENSORS"); !text.empty()) {
    env.sharedTensors = integer("FASTCOLL_SHARED_TENSORS", text, 0, 1) == 1;
    env.sharedTensorsIsSet = true;
  }
  if (auto text = variable("FASTCOLL_SHARED_BUCKETS"); !text.empty()) {
    env.sharedBuckets = integer("FASTCOLL_SHARED_BUCKETS", text, 0, 1) == 1;
    env.sharedBucketsIsSet = true;
  }
  if (auto text = variable("FASTCOLL_TRACE_SIZE"); !text.empty()) {
    env.traceSize = integer("FASTCOLL_TRACE_SIZE", text, 0, 1 << 20);
  }
  if (auto text = variable("FASTCOLL_TRACE_STACKS"); !text.empty()) {
    env.traceStacks = integer("FASTCOLL_TRACE_STACKS", text, 0, 1) == 1;
  }
  if (const char* prefix = std::getenv("FASTCOLL_TRACE_DUMP"); prefix != nullptr) {
    env.traceDump = prefix;
  }
  if (auto text = variable("FASTCOLL_TRACE_SIGNAL"); !text.empty()) {
    env.traceSignal = signalNumber(text);
    if (env.traceSignal == 0 && text != "none") {
      reject("FASTCOLL_TRACE_SIGNAL", text, "none, USR1, USR2, HUP or QUIT");
    }
  }
  return env;
}

LogLevel logLevel() {
  LogLevel level = LogLevel::Warn;
  parseLevel(variable("FASTCOLL_DEBUG"), level);
  return level;
}

void log(LogLevel level, const std::string& text) {
  if (level == LogLevel::Off || level > logLevel()) return;
  const std::string line = "[fastcoll] " + text + "\n";
  // One write, so that lines of several ranks do not interleave; a full pipe loses the line.
  [[maybe_unused]] const auto written = ::write(STDERR_FILENO, line.data(), line.size());
}

}  // namespace fastcoll
