#include "base/topology.hpp"

#include <sys/random.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <charconv>
#include <cstring>
#include <ctime>
#include <filesystem>
#include <fstream>
#include <sstream>

#include "base/error.hpp"
#include "base/weak_registry.hpp"

namespace fastcoll {
namespace {

void randomBytes(void* into, std::size_t bytes) {
  // Requests of up to 256 bytes are never cut short once the pool is initialised.
  ssize_t got = 0;
  do {
    got = ::getrandom(into, bytes, 0);
  } while (got < 0 && errno == EINTR);
  if (got != static_cast<ssize_t>(bytes)) {
    throw Error(ErrorKind::Backend, "fastcoll: getrandom failed (", std::strerror(errno),
                "). Allow the call in the container's seccomp profile.");
  }
}

}  // namespace

Nonce128 randomNonce128() {
  Nonce128 nonce;
  randomBytes(nonce.data(), nonce.size());
  return nonce;
}

std::uint64_t randomNonce64() {
  std::uint64_t nonce = 0;
  while (nonce == 0) randomBytes(&nonce, sizeof nonce);
  return nonce;
}

std::string bootId() {
  std::ifstream file("/proc/sys/kernel/random/boot_id");
  std::string id;
  file >> id;
  return id;
}

std::uint64_t networkNamespace() {
  struct stat info{};
  return ::stat("/proc/self/ns/net", &info) == 0 ? static_cast<std::uint64_t>(info.st_ino) : 0;
}

std::string hostName() {
  char name[256] = {};
  if (::gethostname(name, sizeof name - 1) != 0) return "unknown";
  return name;
}

namespace {

/// The text behind the command name in /proc/<pid>/stat, or "".
std::string statusFields(int pid) {
  std::ifstream file(concat("/proc/", pid, "/stat"));
  std::string line;
  if (!std::getline(file, line)) return "";
  // The command name is in parentheses and may itself contain spaces and parentheses.
  const auto close = line.rfind(')');
  return close == std::string::npos || close + 2 >= line.size() ? "" : line.substr(close + 2);
}

}  // namespace

char processState(int pid) {
  const std::string fields = statusFields(pid);
  return fields.empty() ? '?' : fields[0];
}

std::optional<std::uint64_t> processStart(int pid) {
  errno = 0;
  const std::string text = statusFields(pid);
  if (text.empty() && errno != ENOENT && errno != ESRCH) return std::nullopt;
  std::istringstream fields(text);
  std::string state;
  if (!(fields >> state) || state == "Z" || state == "X") return 0;
  std::string skipped;
  for (int field = 4; field < 22; ++field) fields >> skipped;
  std::uint64_t start = 0;
  fields >> start;
  return start;
}

namespace {

struct RunningProcesses {
  RunningProcesses() {
    std::error_code error;
    std::filesystem::directory_iterator entry("/proc", error);
    for (; !error && entry != std::filesystem::directory_iterator(); entry.increment(error)) {
      const std::string name = entry->path().filename();
      const char* const end = name.data() + name.size();
      int pid = 0;
      if (std::from_chars(name.data(), end, pid).ptr != end) continue;
      if (const auto start = processStart(pid).value_or(0)) starts[pid] = start;
    }
  }
  std::unordered_map<int, std::uint64_t> starts;
};

}  // namespace

const std::unordered_map<int, std::uint64_t>& processesAtFirstCall() {
  static auto* all = new PerProcess<RunningProcesses>;
  return all->get().starts;
}

std::uint64_t processBegan() {
  const long perSecond = ::sysconf(_SC_CLK_TCK);
  return processStart(static_cast<int>(::getpid())).value_or(0) *
         (1000000000ull / static_cast<std::uint64_t>(perSecond > 0 ? perSecond : 100));
}

std::uint64_t nanosecondsSinceBoot() {
  timespec time{};
  ::clock_gettime(CLOCK_BOOTTIME, &time);
  return static_cast<std::uint64_t>(time.tv_sec) * 1000000000ull +
         static_cast<std::uint64_t>(time.tv_nsec);
}

std::uint64_t pidNamespace() {
  struct stat info{};
  return ::stat("/proc/self/ns/pid", &info) == 0 ? static_cast<std::uint64_t>(info.st_ino) : 0;
}

}  // namespace fastcoll
