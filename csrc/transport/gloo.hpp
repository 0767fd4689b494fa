// Collectives between ranks that cannot share memory, over torch's Gloo backend as a mover of
// bytes.
//
// Gloo only exchanges bytes here (all_gather and all_to_all of uint8); signatures are compared and
// reductions are done by the same kernels as over shared memory, so that a
// result's bits, the dtypes and the errors do not depend on the transport.
#pragma once

#include <torch/csrc/distributed/c10d/Backend.hpp>

#include <atomic>
#include <memory>
#include <string>
#include <vector>

#include "../engine/cpu_engine.hpp"

namespace fastcoll {

/// Memory that is kept from one collective to the next: fresh pages cost more than the copies.
class Scratch {
 public:
  std::uint8_t* get(std::size_t bytes) {
    if (bytes > bytes_) {
      memory_.reset(new std::uint8_t[bytes]);
      bytes_ = bytes;
    }
    return memory_.get();
  }

 private:
  std::unique_ptr<std::uint8_t[]> memory_;
  std::size_t bytes_ = 0;
};

/// What Gloo's threads may read and write while a collective is under way.
struct GlooBuffers {
  Scratch send;
  Scratch receive;
  Scratch result;
  Scratch frames;
};

class GlooTransport : public RemoteTransport {
 public:
  explicit GlooTransport(c10::intrusive_ptr<c10d::Backend> gloo) : gloo_(std::move(gloo)) {}
  /// Gloo cannot be interrupted: what was given up is left to a thread that nobody waits for.
  ~GlooTransport() override;

  void run(const Request& request, const std::shared_ptr<void>& owner,
           const std::string& prefix) override;
  void abort() noexcept override { aborted_.store(true, std::memory_order_release); }
  const c10::intrusive_ptr<c10d::Backend>& backend() const { return gloo_; }

 private:
  c10::intrusive_ptr<c10d::Backend> gloo_;
  std::shared_ptr<GlooBuffers> buffers_ = std::make_shared<GlooBuffers>();
  std::atomic<bool> aborted_{false};
  // Memory that an operation which was given up may still touch.
  std::vector<std::shared_ptr<void>> abandoned_;
};

}  // namespace fastcoll
