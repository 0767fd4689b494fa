// What a user may set per group: fastcoll.Options in Python. Environment variables win over it.
#pragma once

#include <torch/csrc/distributed/c10d/Backend.hpp>

#include "base/env.hpp"

namespace fastcoll {

struct Options : c10d::Backend::Options {
  explicit Options(std::chrono::milliseconds timeout = kBackendDefaultTimeout)
      : c10d::Backend::Options("fastcoll", timeout) {}

  TransportChoice transport = TransportChoice::Auto;
  std::size_t segmentBytes = 128 * 1024;  // of one pipeline segment
  int spinMicros = -1;                    // spin before sleeping; -1: by the number of cores
};

}  // namespace fastcoll
