// The network over torch's Gloo: two backends of two ranks for each connection, one for each way,
// of which only send and recv are used.
#pragma once

#include <torch/csrc/distributed/c10d/Backend.hpp>

#include <atomic>
#include <functional>
#include <memory>
#include <string>

#include "connection.hpp"
#include "loop_sockets.hpp"

namespace fastcoll {

class GlooNetwork : public Network {
 public:
  /// Makes a backend of two ranks; `name` is equal on both, and its store keys are its own. `look`
  /// is called while it waits, and ends that by what it throws.
  using MakeBackend = std::function<c10::intrusive_ptr<c10d::Backend>(
      const std::string& name, int rank, Milliseconds, const std::function<void()>& look)>;
  /// `start` makes a device and returns what makes backends on it. `silence`: after which a peer's
  /// host counts as lost; 0: never.
  GlooNetwork(const std::function<MakeBackend()>& start, Milliseconds silence);
  ~GlooNetwork() override;

  std::unique_ptr<Connection> connect(const std::string& name, bool first, Milliseconds timeout,
                                      const std::function<void()>& look) override;
  void stopConnecting() override { *stopped_ = true; }
  void drain(TimePoint until) override { sockets_.drain(until); }

 private:
  class Alarm;
  struct Sentinel;
  class GlooTransfer;
  class GlooConnection;

  MakeBackend makeBackend_;
  const LoopSockets sockets_;
  const Milliseconds silence_;
  std::shared_ptr<Alarm> alarm_;
  const std::shared_ptr<std::atomic<bool>> stopped_ = std::make_shared<std::atomic<bool>>(false);
};

}  // namespace fastcoll
