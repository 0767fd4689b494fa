// What a user may set per group: fastcoll.Options in Python. Environment variables win over it.
#pragma once

#include <torch/csrc/distributed/c10d/Backend.hpp>

#include <optional>

#include "algorithms/tuning.hpp"
#include "base/settings.hpp"
#include "device/nccl_config.hpp"
#include "torch_version.hpp"

namespace fastcoll {

struct Options : c10d::Backend::Options {
  explicit Options(std::chrono::milliseconds timeout = kBackendDefaultTimeout)
      : c10d::Backend::Options("fastcoll", timeout) {}
  /// For a group that is split or merged: torch sets its timeout and name in what it is given.
  c10::intrusive_ptr<c10d::Backend::Options> clone() const FASTCOLL_OVERRIDES_2_14 {
    return c10::make_intrusive<Options>(*this);
  }

  /// Those of a group are fields of Options in Python too.
  Settings settings;
  /// Sizes at which algorithms change; nullopt: fastcoll/tuning.py loads the table of the host.
  std::optional<TuningTable> tuning;
  /// Of the streams on which asynchronous calls on device tensors run.
  bool highPriorityStream = true;
  /// Whether wait() of a call on device tensors waits on the host, as without streams.
  bool blockingWait = false;
  /// Of NCCL's communicators.
  NcclConfig config;
};

}  // namespace fastcoll
