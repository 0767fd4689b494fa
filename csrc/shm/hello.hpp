// The only message that two processes of a host exchange over their unix socket. It has the nonces
// of sender and receiver, and the descriptor of the sender's arena. Every field is checked before
// it is used.
#pragma once

#include <cstdint>
#include <string>

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

/// A SOCK_SEQPACKET socket that listens at the abstract name; throws Error(Backend).
int listenAt(const Nonce128& socketName);
/// A connected socket, or -1 if no process accepts there. Throws Error(Backend) if it cannot open a
/// socket.
int connectTo(const Nonce128& socketName);
/// Sends the hello with one descriptor. Returns false if that fails: the peer has exited.
bool sendHello(int socket, const Hello& hello, int descriptor);
/// Receives a hello with exactly one descriptor, without waiting. Returns "" and the descriptor,
/// which the caller owns. On failure returns the reason, and no descriptor stays open.
std::string receiveHello(int socket, Hello& hello, int& descriptor);

}  // namespace fastcoll
