// The only message that two processes of a host exchange over their unix socket. It has the nonces
// of sender and receiver, and the descriptor of the sender's arena. Every field is checked before
// it is used.
#pragma once

#include <unistd.h>

#include <cstdint>
#include <string>
#include <utility>

#include "base/topology.hpp"

namespace fastcoll {

struct Hello {
  std::uint64_t magic;
  std::uint32_t abi;
  std::uint32_t bytesOfThis;
  Nonce128 sender;
  Nonce128 receiver;  // the nonce of the process that the sender means
  std::uint64_t arenaBytes;
};

/// An open file, or -1. Its owner closes it.
class Descriptor {
 public:
  explicit Descriptor(int fd = -1) : fd_(fd) {}
  Descriptor(Descriptor&& other) noexcept : fd_(std::exchange(other.fd_, -1)) {}
  Descriptor& operator=(Descriptor&& other) noexcept {
    std::swap(fd_, other.fd_);
    return *this;
  }
  ~Descriptor() {
    if (fd_ >= 0) ::close(fd_);
  }
  int get() const { return fd_; }

 private:
  int fd_;
};

/// A SOCK_SEQPACKET socket that listens at the abstract name; throws Error(Backend).
Descriptor listenAt(const Nonce128& socketName);
/// A connected socket, or none if no process accepts there. Throws Error(Backend) if it cannot open
/// a socket.
Descriptor connectTo(const Nonce128& socketName);
/// Whether the process at the other end is of this user; logs it otherwise.
bool isOfThisUser(int socket);
/// Sends the hello with one descriptor. Returns false if that fails: the peer has exited.
bool sendHello(int socket, const Hello& hello, int descriptor);
/// Receives a hello with exactly one descriptor, without waiting. Returns "" or, on failure, the
/// reason.
std::string receiveHello(int socket, Hello& hello, Descriptor& descriptor);

}  // namespace fastcoll
