// The one message that two processes of a host exchange over their unix socket: who I am, whom I
// mean, and the descriptor of my arena. Everything that comes in is checked before it is believed.
#pragma once

#include <cstdint>
#include <string>

#include "../base/topology.hpp"

namespace fastcoll {

struct Hello {
  std::uint64_t magic;
  std::uint32_t abi;
  std::uint32_t bytesOfThis;
  Nonce128 sender;
  Nonce128 receiver;  // the nonce that the sender believes the receiver to have
  std::uint64_t arenaBytes;
};

/// A SOCK_SEQPACKET socket that listens at the abstract name; throws Error(Backend).
int listenAt(const Nonce128& socketName);
/// A connected socket, or -1 when nobody listens there.
int connectTo(const Nonce128& socketName);
/// Sends the hello with one descriptor. False when the peer went away.
bool sendHello(int socket, const Hello& hello, int descriptor);
/// Receives a hello with exactly one descriptor, waiting until `timeoutMs`. On success returns ""
/// and the descriptor (owned by the caller); otherwise the reason, and no descriptor stays open.
std::string receiveHello(int socket, int timeoutMs, Hello& hello, int& descriptor);

}  // namespace fastcoll
