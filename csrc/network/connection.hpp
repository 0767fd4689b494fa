// Bytes between processes that share no memory. This layer handles peers, tags and bytes, not
// groups, collectives or requests.
//
// A connection has two ends. Transfers of one tag and direction are matched in the order in which
// they were begun. A receive takes a message of at most its own size; a longer one breaks the
// connection. Nothing is lost or torn: a transfer ends whole, or its connection breaks.
#pragma once

#include <cstddef>
#include <functional>
#include <memory>
#include <string>

#include "base/clock.hpp"
#include "base/error.hpp"

namespace fastcoll {

/// A connection broke; the cause is not known.
struct ConnectionLost : Error {
  using Error::Error;
};
/// This process cannot connect to any peer.
struct CannotConnect : Error {
  using Error::Error;
};
/// The error text for a broken connection to a peer.
inline std::string brokeOff(const std::string& peer, const std::string& how) {
  return concat(peer,
                ": connection closed by peer (the process ended or left, or its host cannot be "
                "reached; ",
                how, ")", kReadLog);
}

/// A send or receive in flight. Its memory is in use until it has ended or its connection is
/// closed, even if this object is destroyed.
class Transfer {
 public:
  virtual ~Transfer() = default;
  /// Waits until the transfer has ended (true) or `until` has passed (false, some milliseconds
  /// late). Throws ConnectionLost. Call from one thread at a time, and not again after true.
  virtual bool wait(TimePoint until) = 0;
};
using TransferRef = std::unique_ptr<Transfer>;

/// One end. Its calls do not wait; they throw ConnectionLost.
class Connection {
 public:
  /// Closes the connection. Afterwards no thread uses the memory of a transfer, and the peer's
  /// transfers break. What was sent but not yet received may be lost.
  virtual ~Connection() = default;
  virtual TransferRef send(const void* data, std::size_t bytes, int tag) = 0;
  virtual TransferRef receive(void* data, std::size_t bytes, int tag) = 0;
};

/// The network of one group. It takes no sockets and threads before its first connection. From any
/// thread.
class Network {
 public:
  /// Time for the other end to connect. It is about to, but may need the GIL, which a computation
  /// of the user may hold.
  static constexpr Milliseconds kConnect{60000};
  /// Time for a slow link, or an overloaded host, to take what was sent before its connection is
  /// closed.
  static constexpr Milliseconds kDrain{10000};
  /// Time for a close notice to be taken, if nothing else is in flight.
  static constexpr Milliseconds kGoodbye{200};

  virtual ~Network() = default;
  /// Waits until the peers' hosts have received what was sent on any connection, or until `until`.
  virtual void drain(TimePoint /*until*/) {}
  /// Connects with the process that calls this with the same name and the other value of `first`.
  /// No other pair uses the name. Waits for that process for `timeout` at most; throws
  /// ConnectionLost. Calls `check` periodically during the wait, which ends if `check` throws.
  virtual std::unique_ptr<Connection> connect(const std::string& name, bool first,
                                              Milliseconds timeout,
                                              const std::function<void()>& check) = 0;
  /// Ends the waits of connect(), also of later calls.
  virtual void stopConnecting() = 0;
};

}  // namespace fastcoll
