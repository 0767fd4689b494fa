// What this process can say of the machine it runs on.
#pragma once

#include <array>
#include <cstdint>
#include <optional>
#include <string>

namespace fastcoll {

using Nonce128 = std::array<std::uint8_t, 16>;

/// Unpredictable bytes from the kernel.
Nonce128 randomNonce128();
std::uint64_t randomNonce64();

/// /proc/sys/kernel/random/boot_id as text, or "" where it cannot be read.
std::string bootId();
/// Inode of this process's network namespace (abstract unix sockets live in one), or 0.
std::uint64_t networkNamespace();
std::string hostName();
/// Inode of this process's pid namespace: pids mean the same to processes that share it. Or 0.
std::uint64_t pidNamespace();
/// When the process began (clock ticks since boot), 0 where no such process runs (or only its
/// zombie), nothing where that cannot be read. With the pid it names a process for ever, though
/// pids are used again.
std::optional<std::uint64_t> processStart(int pid);
/// When this process began, and now, in nanoseconds since boot (equal for all processes of a
/// machine).
std::uint64_t processBegan();
std::uint64_t nanosecondsSinceBoot();
/// State letter of /proc/<pid>/stat ('R', 'S', 'T' ...), or '?' where it cannot be seen.
char processState(int pid);
/// A signal or a debugger has stopped the process.
inline bool isStopped(char state) {
  return state == 'T' || state == 't';
}

}  // namespace fastcoll
