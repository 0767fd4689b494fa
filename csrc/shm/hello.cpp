#include "shm/hello.hpp"

#include <fcntl.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>

#include <cerrno>
#include <cstring>

#include "base/error.hpp"
#include "base/log.hpp"
#include "shm/arena.hpp"

namespace fastcoll {
namespace {

socklen_t abstractAddress(const Nonce128& name, sockaddr_un& address) {
  static const char digits[] = "0123456789abcdef";
  std::memset(&address, 0, sizeof address);
  address.sun_family = AF_UNIX;
  char* out = address.sun_path + 1;  // a leading NUL makes the name abstract
  const char prefix[] = "fastcoll-";
  std::memcpy(out, prefix, sizeof prefix - 1);
  out += sizeof prefix - 1;
  for (const std::uint8_t byte : name) {
    *out++ = digits[byte >> 4];
    *out++ = digits[byte & 15];
  }
  return static_cast<socklen_t>(out - reinterpret_cast<char*>(&address));
}

Descriptor newSocket() {
  return Descriptor(::socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
}

}  // namespace

Descriptor listenAt(const Nonce128& socketName) {
  sockaddr_un address{};
  const socklen_t length = abstractAddress(socketName, address);
  Descriptor socket = newSocket();
  if (socket.get() < 0 ||
      ::bind(socket.get(), reinterpret_cast<sockaddr*>(&address), length) != 0 ||
      ::listen(socket.get(), 128) != 0) {
    throw Error(ErrorKind::Backend, "fastcoll: cannot listen on an abstract unix socket (",
                std::strerror(errno),
                "). Raise the limit on open files, or set FASTCOLL_SHARED_MEMORY=off.");
  }
  return socket;
}

Descriptor connectTo(const Nonce128& socketName) {
  sockaddr_un address{};
  const socklen_t length = abstractAddress(socketName, address);
  Descriptor socket = newSocket();
  if (socket.get() < 0) {
    throw Error(ErrorKind::Backend, "fastcoll: cannot open a unix socket (", std::strerror(errno),
                "). Raise the limit on open files.");
  }
  int result = 0;
  do {
    result = ::connect(socket.get(), reinterpret_cast<sockaddr*>(&address), length);
  } while (result != 0 && errno == EINTR);
  return result == 0 ? std::move(socket) : Descriptor();
}

bool isOfThisUser(int socket) {
  ucred credentials{};
  socklen_t length = sizeof credentials;
  if (::getsockopt(socket, SOL_SOCKET, SO_PEERCRED, &credentials, &length) == 0 &&
      credentials.uid == ::geteuid()) {
    return true;
  }
  log(LogLevel::Info, "refused a connection from user ", credentials.uid);
  return false;
}

bool sendHello(int socket, const Hello& hello, int descriptor) {
  iovec part{const_cast<Hello*>(&hello), sizeof hello};
  alignas(cmsghdr) char control[CMSG_SPACE(sizeof(int))] = {};
  msghdr message{};
  message.msg_iov = &part;
  message.msg_iovlen = 1;
  message.msg_control = control;
  message.msg_controllen = sizeof control;
  cmsghdr* header = CMSG_FIRSTHDR(&message);
  header->cmsg_level = SOL_SOCKET;
  header->cmsg_type = SCM_RIGHTS;
  header->cmsg_len = CMSG_LEN(sizeof(int));
  std::memcpy(CMSG_DATA(header), &descriptor, sizeof(int));
  ssize_t sent = 0;
  do {
    sent = ::sendmsg(socket, &message, MSG_NOSIGNAL);
  } while (sent < 0 && errno == EINTR);
  return sent == static_cast<ssize_t>(sizeof hello);
}

std::string receiveHello(int socket, Hello& hello, Descriptor& descriptor) {
  std::memset(&hello, 0, sizeof hello);
  iovec part{&hello, sizeof hello};
  // Room for more than one descriptor: a hostile surplus is received and closed, not leaked.
  alignas(cmsghdr) char control[CMSG_SPACE(8 * sizeof(int))] = {};
  msghdr message{};
  message.msg_iov = &part;
  message.msg_iovlen = 1;
  message.msg_control = control;
  message.msg_controllen = sizeof control;
  const ssize_t got = ::recvmsg(socket, &message, MSG_CMSG_CLOEXEC | MSG_DONTWAIT);
  if (got < 0 && (errno == EAGAIN || errno == EWOULDBLOCK)) return "no answer";
  int received = 0;
  Descriptor first;
  if (got >= 0) {
    for (cmsghdr* header = CMSG_FIRSTHDR(&message); header != nullptr;
         header = CMSG_NXTHDR(&message, header)) {
      if (header->cmsg_level != SOL_SOCKET || header->cmsg_type != SCM_RIGHTS) continue;
      const std::size_t count = (header->cmsg_len - CMSG_LEN(0)) / sizeof(int);
      for (std::size_t i = 0; i < count; ++i) {
        int fd = -1;
        std::memcpy(&fd, CMSG_DATA(header) + i * sizeof(int), sizeof(int));
        Descriptor owned(fd);
        if (received++ == 0) first = std::move(owned);
      }
    }
  }
  struct stat info{};
  if (got != static_cast<ssize_t>(sizeof hello) || (message.msg_flags & MSG_TRUNC) != 0) {
    return concat("a handshake of ", got, " bytes where ", sizeof hello, " were expected");
  }
  if (hello.magic != kArenaMagic) return "a handshake that does not come from fastcoll";
  if (hello.abi != kAbiVersion || hello.bytesOfThis != sizeof hello) {
    return concat("a handshake of another version of fastcoll (shared-memory layout ", hello.abi,
                  ", here ", kAbiVersion, "); install the same version for all ranks");
  }
  if (received != 1 || (message.msg_flags & MSG_CTRUNC) != 0) {
    return "a handshake without its memory descriptor; raise the limit on open files";
  }
  if (!isOfThisUser(socket)) return "a handshake from another user; run all ranks as one user";
  if (::fstat(first.get(), &info) != 0 || info.st_size < 0 ||
      static_cast<std::uint64_t>(info.st_size) != hello.arenaBytes ||
      hello.arenaBytes < ArenaHeader::kBytes) {
    return "a memory descriptor of a size other than stated";
  }
  const int seals = ::fcntl(first.get(), F_GET_SEALS);
  if (seals >= 0 && (seals & F_SEAL_SHRINK) == 0) return "shared memory that could be cut short";
  descriptor = std::move(first);
  return "";
}

}  // namespace fastcoll
