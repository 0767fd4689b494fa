// Facts about the machine, its namespaces and its processes, and random bytes.
#pragma once

#include <array>
#include <cstdint>
#include <optional>
#include <string>
#include <unordered_map>

namespace fastcoll {

using Nonce128 = std::array<std::uint8_t, 16>;

/// Unpredictable bytes from the kernel.
Nonce128 randomNonce128();
std::uint64_t randomNonce64();

/// /proc/sys/kernel/random/boot_id as text, or "" where it cannot be read.
std::string bootId();
/// Inode of this process's network namespace, or 0. Abstract unix sockets belong to one.
std::uint64_t networkNamespace();
std::string hostName();
/// Inode of this process's pid namespace, or 0. Processes that share it agree on pids.
std::uint64_t pidNamespace();
/// Start time of the process, in clock ticks since boot. 0: no such process runs, or it is a
/// zombie. Nothing: the time cannot be read. Pids are reused, but pid and start time together
/// identify a process for good.
std::optional<std::uint64_t> processStart(int pid);
/// The start times, by pid, of the processes that ran when this process called this first. It takes
/// some 15 us for each process of the machine, once.
const std::unordered_map<int, std::uint64_t>& processesAtFirstCall();
/// Start time of this process, and the present time, in nanoseconds since boot. The boot time is
/// the same for all processes of a machine.
std::uint64_t processBegan();
std::uint64_t nanosecondsSinceBoot();
/// State letter of /proc/<pid>/stat ('R', 'S', 'T' ...), or '?' if it cannot be read.
char processState(int pid);
/// Whether a signal or a debugger has stopped the process.
inline bool isStopped(char state) {
  return state == 'T' || state == 't';
}

}  // namespace fastcoll
