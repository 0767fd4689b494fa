#include "network/loop_sockets.hpp"

#include <linux/sockios.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sys/ioctl.h>
#include <sys/socket.h>

#include <algorithm>
#include <cstdio>
#include <filesystem>
#include <thread>

#include "base/error.hpp"

namespace fastcoll {
namespace {

int option(int fd, int level, int name) {
  int value = -1;
  socklen_t size = sizeof value;
  return ::getsockopt(fd, level, name, &value, &size) == 0 ? value : -1;
}

void setOption(int fd, int level, int name, int value) {
  (void)::setsockopt(fd, level, name, &value, sizeof value);
}

bool isTcp(int fd) {
  const int domain = option(fd, SOL_SOCKET, SO_DOMAIN);
  return (domain == AF_INET || domain == AF_INET6) &&
         option(fd, SOL_SOCKET, SO_TYPE) == SOCK_STREAM;
}

bool listens(int fd) {
  return isTcp(fd) && option(fd, SOL_SOCKET, SO_ACCEPTCONN) == 1;
}

/// The open descriptors of epoll instances.
std::vector<int> openPolls() {
  std::vector<int> polls;
  std::error_code ignored;  // other threads close files meanwhile
  for (std::filesystem::directory_iterator one("/proc/self/fd", ignored), end; one != end;
       one.increment(ignored)) {
    if (std::filesystem::read_symlink(one->path(), ignored) == "anon_inode:[eventpoll]") {
      polls.push_back(std::stoi(one->path().filename()));
    }
  }
  return polls;
}

/// The descriptors that an epoll watches; see proc(5), /proc/pid/fdinfo.
std::vector<int> watchedBy(int poll) {
  std::vector<int> watched;
  std::FILE* const file = std::fopen(concat("/proc/self/fdinfo/", poll).c_str(), "re");
  if (file == nullptr) return watched;
  char line[256];
  while (std::fgets(line, sizeof line, file) != nullptr) {
    int fd = -1;
    if (std::sscanf(line, "tfd: %d", &fd) == 1) watched.push_back(fd);
  }
  std::fclose(file);
  return watched;
}

}  // namespace

LoopSockets::LoopSockets(const std::function<void()>& start) {
  const std::vector<int> before = openPolls();
  start();
  for (const int poll : openPolls()) {
    if (std::ranges::find(before, poll) != before.end()) continue;
    const std::vector<int> watched = watchedBy(poll);
    if (std::ranges::any_of(watched, listens)) polls_.push_back(poll);
  }
}

std::vector<int> LoopSockets::connected() const {
  std::vector<int> sockets;
  for (const int poll : polls_) {
    for (const int fd : watchedBy(poll)) {
      if (isTcp(fd) && !listens(fd)) sockets.push_back(fd);
    }
  }
  return sockets;
}

void LoopSockets::drain(const std::vector<int>& sockets, TimePoint until) const {
  for (;;) {
    const std::vector<int> open = connected();
    const bool empty = std::ranges::all_of(sockets, [&open](int fd) {
      int bytes = 0;
      return std::ranges::find(open, fd) == open.end() || ::ioctl(fd, SIOCOUTQ, &bytes) != 0 ||
             bytes == 0;
    });
    if (empty || Clock::now() >= until) return;
    std::this_thread::sleep_for(std::chrono::microseconds(200));
  }
}

void LoopSockets::tune(const std::vector<int>& sockets, Milliseconds silence) {
  for (const int fd : sockets) {
    setOption(fd, IPPROTO_TCP, TCP_NODELAY, 1);
    if (silence.count() <= 0) continue;
    // The kernel probes an idle peer's kernel. The limit applies to answers to probes and to data.
    const int seconds = static_cast<int>(silence.count() / 1000);
    setOption(fd, SOL_SOCKET, SO_KEEPALIVE, 1);
    setOption(fd, IPPROTO_TCP, TCP_KEEPIDLE, std::max(1, seconds / 3));
    setOption(fd, IPPROTO_TCP, TCP_KEEPINTVL, std::max(1, seconds / 6));
    setOption(fd, IPPROTO_TCP, TCP_USER_TIMEOUT, static_cast<int>(silence.count()));
  }
}

}  // namespace fastcoll
