// What a user may set per group: fastcoll.Options in Python. Environment variables win over it.
#pragma once

#include <torch/csrc/distributed/c10d/Backend.hpp>

#include <optional>

#include "algorithms/tuning.hpp"
#include "base/env.hpp"
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

  TransportChoice transport = TransportChoice::Auto;
  std::size_t ringBytes = std::size_t{2} << 20;  // shared memory through which a rank's data goes
  int spinMicros = -1;                           // before sleeping; -1: by the ranks' cores
  int linkSeconds = 10;  // of silence, after which another host counts as lost; 0: TCP's own bounds
  /// Whether torch allocates CPU tensors in shared memory from now on; of the whole process.
  bool sharedTensors = false;
  /// Whether DDP is told that it may allocate its buckets here (allocateTensor).
  bool sharedBuckets = true;
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
