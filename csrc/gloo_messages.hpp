// What carries messages between the ranks of a group that is on several hosts: torch's Gloo, with a
// connection between any two ranks.
#pragma once

#include <torch/csrc/distributed/c10d/Backend.hpp>

#include <utility>

#include "engine/cpu_engine.hpp"

namespace fastcoll {

class GlooMessages : public RemoteMessages {
 public:
  explicit GlooMessages(c10::intrusive_ptr<c10d::Backend> gloo) : gloo_(std::move(gloo)) {}
  const c10::intrusive_ptr<c10d::Backend>& backend() const { return gloo_; }

 private:
  c10::intrusive_ptr<c10d::Backend> gloo_;
};

}  // namespace fastcoll
