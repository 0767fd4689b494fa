// Collectives between ranks that cannot share memory, over torch's Gloo backend as a mover of
// bytes.
//
// Gloo only exchanges bytes here (all_gather and all_to_all of uint8); signatures are compared and
// reductions are done by the same kernels in the same rank order as over shared memory, so that a
// result's bits, the dtypes and the errors do not depend on the transport.
#pragma once

#include <torch/csrc/distributed/c10d/Backend.hpp>

#include <memory>
#include <string>

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

class GlooTransport : public RemoteTransport {
 public:
  explicit GlooTransport(c10::intrusive_ptr<c10d::Backend> gloo) : gloo_(std::move(gloo)) {}

  void run(const Request& request, const std::string& prefix) override;
  void abort() noexcept override;
  const c10::intrusive_ptr<c10d::Backend>& backend() const { return gloo_; }

 private:
  c10::intrusive_ptr<c10d::Backend> gloo_;
  Scratch send_;
  Scratch receive_;
  Scratch result_;
};

}  // namespace fastcoll
