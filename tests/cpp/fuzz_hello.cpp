// Fuzzes the unix socket: messages of any bytes and length, with any number and kind of
// descriptors. Every field must be checked before it is used, and no descriptor may stay open.
//   input: kind of the descriptors, their number, the message
#include <fcntl.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cstring>

#include "fuzz_target.hpp"
#include "shm/arena.hpp"
#include "shm/hello.hpp"

using namespace fastcoll;

namespace {

constexpr std::uint64_t kBytes = 1 << 20;

int memory(bool sealed, std::uint64_t bytes) {
  const int fd = ::memfd_create("fuzz", MFD_CLOEXEC | MFD_ALLOW_SEALING);
  if (::ftruncate(fd, static_cast<off_t>(bytes)) != 0) std::abort();
  if (sealed) ::fcntl(fd, F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL);
  return fd;
}

/// Descriptors that a peer may send.
const int* descriptors() {
  static const int all[4] = {memory(true, kBytes), memory(false, kBytes), memory(true, 4096),
                             ::open("/dev/null", O_RDWR | O_CLOEXEC)};
  return all;
}

/// Number of open descriptors from `first` on, over as many as one call could leave open.
int openAbove(int first) {
  int count = 0;
  for (int fd = first; fd < first + 40; ++fd) count += ::fcntl(fd, F_GETFD) >= 0;
  return count;
}

int lowestFree() {
  const int fd = ::dup(0);
  ::close(fd);
  return fd;
}

void send(int socket, const fuzz::Bytes& data, int descriptor, std::size_t count) {
  iovec part{const_cast<std::uint8_t*>(data.data()), data.size()};
  alignas(cmsghdr) char control[CMSG_SPACE(16 * sizeof(int))] = {};
  msghdr message{};
  message.msg_iov = &part;
  message.msg_iovlen = 1;
  if (count > 0) {
    message.msg_control = control;
    message.msg_controllen = CMSG_SPACE(count * sizeof(int));
    cmsghdr* header = CMSG_FIRSTHDR(&message);
    header->cmsg_level = SOL_SOCKET;
    header->cmsg_type = SCM_RIGHTS;
    header->cmsg_len = CMSG_LEN(count * sizeof(int));
    for (std::size_t i = 0; i < count; ++i) {
      std::memcpy(CMSG_DATA(header) + i * sizeof(int), &descriptor, sizeof(int));
    }
  }
  ::sendmsg(socket, &message, MSG_NOSIGNAL);
}

}  // namespace

std::vector<fuzz::Bytes> fuzz::seeds() {
  std::vector<Bytes> all;
  const Hello good{kArenaMagic, kAbiVersion, sizeof(Hello), {1, 2, 3}, {4, 5, 6}, kBytes};
  for (const std::uint8_t kind : {0, 1, 2, 3}) {
    for (const std::uint8_t count : {0, 1, 2, 9, 16}) {
      Bytes input{kind, count};
      const auto* bytes = reinterpret_cast<const std::uint8_t*>(&good);
      input.insert(input.end(), bytes, bytes + sizeof good);
      all.push_back(input);
    }
  }
  return all;
}

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  fuzz::Reader input(data, size);
  const int descriptor = descriptors()[input.byte() % 4];
  const std::size_t count = input.byte() % 17;
  const int lowest = lowestFree();
  const int before = openAbove(lowest);
  int pair[2];
  if (::socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, pair) != 0) std::abort();
  send(pair[0], input.take(input.left()), descriptor, count);
  Hello hello;
  Descriptor owned;
  const std::string problem = receiveHello(pair[1], hello, owned);
  const int received = owned.get();
  if (problem.empty()) {
    struct stat info{};
    FUZZ_CHECK(hello.magic == kArenaMagic && hello.abi == kAbiVersion);
    FUZZ_CHECK(count == 1 && received >= 0);
    FUZZ_CHECK(::fstat(received, &info) == 0);
    FUZZ_CHECK(static_cast<std::uint64_t>(info.st_size) == hello.arenaBytes);
    FUZZ_CHECK(hello.arenaBytes >= ArenaHeader::kBytes);
    FUZZ_CHECK((::fcntl(received, F_GET_SEALS) & F_SEAL_SHRINK) != 0);
  } else {
    FUZZ_CHECK(received == -1);
  }
  owned = Descriptor();
  ::close(pair[0]);
  ::close(pair[1]);
  FUZZ_CHECK(openAbove(lowest) == before);
  return 0;
}
