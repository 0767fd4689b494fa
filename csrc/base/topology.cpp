#include "base/topology.hpp"

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
  if (::getentropy(into, bytes) != 0) {
    throw Error(ErrorKind::Backend, "fastcoll: getrandom failed (", std::strerror(errno),
                "). Allow the call in the container's seccomp profile.");
  }
}

/// The text behind the command name in /proc/<pid>/stat, or "".
std::string statusFields(int pid) {
  std::ifstream file(concat("/proc/", pid, "/stat"));
  std::string line;
  if (!std::getline(file, line)) return "";
  // The command name is in parentheses and may itself contain spaces and parentheses.
  const auto close = line.rfind(')');
  return close == std::string::npos || close + 2 >= line.size() ? "" : line.substr(close + 2);
}

/// Inode of a namespace of this process, or 0.
std::uint64_t inodeOf(const char* space) {
  struct stat info{};
  return ::stat(space, &info) == 0 ? static_cast<std::uint64_t>(info.st_ino) : 0;
}

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
  return inodeOf("/proc/self/ns/net");
}

std::string hostName() {
  char name[256] = {};
  if (::gethostname(name, sizeof name - 1) != 0) return "unknown";
  return name;
}

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

const std::unordered_map<int, std::uint64_t>& processesAtFirstCall() {
  return perProcess<RunningProcesses>().starts;
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
  return inodeOf("/proc/self/ns/pid");
}

}  // namespace fastcoll
