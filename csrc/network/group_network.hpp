// The network of one group, made when it is first needed.
#pragma once

#include <memory>
#include <mutex>

#include "network/connection.hpp"

namespace fastcoll {

/// From any thread.
class GroupNetwork {
 public:
  virtual ~GroupNetwork() = default;
  std::shared_ptr<Network> get() {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (network_ == nullptr) network_ = make();
    return network_;
  }
  /// Ends the waits of Network::connect(), also of later calls, if the network is made.
  void stopConnecting() {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (network_ != nullptr) network_->stopConnecting();
  }

 private:
  virtual std::shared_ptr<Network> make() = 0;

  std::mutex mutex_;
  std::shared_ptr<Network> network_;
};

}  // namespace fastcoll
