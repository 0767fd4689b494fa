// The network over torch's Gloo. Each connection has two backends of two ranks, one for each
// direction. Only their send and recv are used.
#pragma once

#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/Store.hpp>

#include <atomic>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "network/loop_sockets.hpp"
#include "network/networks.hpp"

namespace fastcoll {

class GlooNetwork : public Network {
 public:
  /// Makes a backend. The backends of one maker share a device, its listening socket and its
  /// thread.
  using Maker = std::function<c10::intrusive_ptr<c10d::Backend>(
      const c10::intrusive_ptr<c10d::Store>&, int rank, int size, Milliseconds)>;
  /// Sets what makes a device and returns the maker. A process has one device as long as a network
  /// exists. Call it before the first group is made.
  static void setFactory(std::function<Maker()> factory);

  explicit GlooNetwork(NetworkSetup setup);
  ~GlooNetwork() override;

  std::unique_ptr<Connection> connect(const std::string& name, bool first, Milliseconds timeout,
                                      const std::function<void()>& check) override;
  void stopConnecting() override { *stopped_ = true; }
  void drain(TimePoint until) override;

 private:
  class Alarm;
  struct Device;
  struct Sentinel;
  class GlooTransfer;
  class GlooConnection;

  const NetworkSetup setup_;
  const std::shared_ptr<std::atomic<bool>> stopped_ = std::make_shared<std::atomic<bool>>(false);
  std::mutex mutex_;
  std::shared_ptr<Device> device_;  // nullptr before the first connection
  std::vector<int> sockets_;        // of connections made here; some may be closed
};

}  // namespace fastcoll
