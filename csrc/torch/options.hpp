// Options that a user may set per group: fastcoll.Options in Python. Environment variables win over
// them.
#pragma once

#include <torch/csrc/distributed/c10d/Backend.hpp>

#include <memory>
#include <optional>

#include "base/settings.hpp"
#include "cpu/algorithms/tuning.hpp"
#include "torch/torch_version.hpp"

namespace fastcoll {

struct Options : c10d::Backend::Options {
  explicit Options(std::chrono::milliseconds timeout = kBackendDefaultTimeout)
      : c10d::Backend::Options("fastcoll", timeout) {}
  /// For a split or merged group: torch sets the new group's timeout and name in the copy.
  c10::intrusive_ptr<c10d::Backend::Options> clone() const FASTCOLL_OVERRIDES_2_14 {
    return c10::make_intrusive<Options>(*this);
  }

  /// The settings of a group are also fields of Options in Python.
  Settings settings;
  /// Sizes at which algorithms change; nullopt: fastcoll/tuning.py loads the table of the host.
  std::optional<TuningTable> tuning;
  /// Priority of the streams on which asynchronous calls on device tensors run.
  bool highPriorityStream = true;
  /// Whether wait() of a call on device tensors waits on the host, as without streams.
  bool blockingWait = false;
  /// Settings of NCCL's communicators: an object of fastcoll/cuda/nccl_config.py; null: none is
  /// set.
  std::shared_ptr<void> config;
};

}  // namespace fastcoll
