#pragma once

#include <string>

#include "base/error.hpp"

namespace fastcoll {

/// What the parts of a group need of it when something fails. From any thread.
class GroupFaults {
 public:
  /// Called without locks before a fault of the group is raised.
  virtual void failing() noexcept = 0;
  /// Publishes a fault to the ranks that share no memory with this one. Returns the fault that came
  /// first.
  virtual Fault publish(const Fault& fault) noexcept = 0;
  /// Throws if such a rank has published a fault.
  virtual void throwIfPublished(const ErrorSite& site) = 0;
  /// Why the connection to a peer broke, or (-1) one of a collective: the fault that a rank
  /// published, or that a process has ended. `text` is the error at this end. May take a moment.
  virtual Fault explain(int peer, const std::string& text) noexcept = 0;

 protected:
  ~GroupFaults() = default;
};

}  // namespace fastcoll
