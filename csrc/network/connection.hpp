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

#include "../base/clock.hpp"
#include "../base/error.hpp"

namespace fastcoll {

/// A connection broke off, which says nothing of whose fault it was.
struct ConnectionLost : Error {
  using Error::Error;
};
/// This process cannot connect with anybody, whatever its peers do.
struct CannotConnect : Error {
  using Error::Error;
};
/// What is known when the connection to a peer breaks.
inline std::string brokeOff(const std::string& peer, const std::string& how) {
  return concat(peer,
                ": connection closed by peer (the process ended or left, or its host cannot be "
                "reached; ",
                how, ")", kReadLog);
}

/// A send or a receive under way. Its memory may be touched until it has ended or its connection is
/// closed, whatever becomes of this object.
class Transfer {
 public:
  virtual ~Transfer() = default;
  /// Waits until the transfer has ended: true; or until `until`: false, some milliseconds late.
  /// Throws ConnectionLost. Of one thread at a time; once true, not again.
  virtual bool wait(TimePoint until) = 0;
};
using TransferRef = std::unique_ptr<Transfer>;

/// One end. Its calls wait for nobody, and throw ConnectionLost.
class Connection {
 public:
  /// Closes the connection: nobody touches any transfer's memory afterwards, and the peer's
  /// transfers break. What was sent but not yet received may be lost.
  virtual ~Connection() = default;
  virtual TransferRef send(const void* data, std::size_t bytes, int tag) = 0;
  virtual TransferRef receive(void* data, std::size_t bytes, int tag) = 0;
};

class Network {
 public:
  /// For the other end to connect, which is about to; but it may need the interpreter's lock for
  /// it, which a computation of the user's may hold.
  static constexpr Milliseconds kConnect{60000};
  /// For a slow link, or a host that has more to do than it can, to take what was sent before its
  /// connection is closed.
  static constexpr Milliseconds kDrain{10000};
  /// For a last word to be taken, where nothing else is under way.
  static constexpr Milliseconds kGoodbye{200};

  virtual ~Network() = default;
  /// Waits until the peers' hosts have what was sent on any connection, or until `until`.
  virtual void drain(TimePoint /*until*/) {}
  /// Connects with the process that calls this with the same name, which no other pair uses, as the
  /// other end. Waits for it, `timeout` at most; throws ConnectionLost. `look` is called now and
  /// then while the wait lasts, and ends it by what it throws.
  virtual std::unique_ptr<Connection> connect(const std::string& name, bool first,
                                              Milliseconds timeout,
                                              const std::function<void()>& look) = 0;
  /// Ends the waits of connect, those to come too.
  virtual void stopConnecting() = 0;
};

}  // namespace fastcoll
