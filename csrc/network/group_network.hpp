// The network of one group, made when it is first needed.
#pragma once

#include <functional>
#include <memory>
#include <mutex>
#include <utility>

#include "network/connection.hpp"

namespace fastcoll {

/// From any thread.
class GroupNetwork {
 public:
  explicit GroupNetwork(std::function<std::shared_ptr<Network>()> make) : make_(std::move(make)) {}
  std::shared_ptr<Network> get() {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (network_ == nullptr) network_ = make_();
    return network_;
  }
  /// Ends the waits of Network::connect(), also of later calls, if the network is made.
  void stopConnecting() {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (network_ != nullptr) network_->stopConnecting();
  }

 private:
  const std::function<std::shared_ptr<Network>()> make_;
  std::mutex mutex_;
  std::shared_ptr<Network> network_;
};

}  // namespace fastcoll
