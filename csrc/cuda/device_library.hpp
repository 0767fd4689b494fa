// The library that moves the data of device tensors.
#pragma once

#include <memory>
#include <vector>

#include "torch/device_engine.hpp"

namespace fastcoll {

class Communicators;

/// Calls the library. Make no call of it under an engine lock that the watchdog takes.
class DeviceLibrary {
 public:
  virtual ~DeviceLibrary() = default;
  /// Makes the communicator of a device, or of a pair of ranks on it, if there is none. Waits for
  /// the other ranks. From any thread. `pair`: the other rank of a pair; -1: all ranks. `captured`:
  /// the caller's stream is being captured into a graph, so none can be made.
  virtual void prepare(c10::Device device, int pair, bool captured) = 0;
  /// Splits a device's communicator; all its ranks call it. Ranks with the same `color` get a
  /// communicator for their new group, in the order of `key`; `child` is that group's library.
  /// nullptr: none (color -1).
  virtual void split(c10::Device device, int color, int key, DeviceLibrary* child) = 0;
  /// Compiles kernels for requests that come for the first time, which may take seconds. From any
  /// thread. `stream`: the one that issue() gets next; nothing is put on it.
  virtual void compile(DeviceLaunch& launch, const c10::Stream& stream) = 0;
  /// Finds what serves the requests: a plan, or the library's own calls. One thread at a time.
  /// `stream` is the current one. `captured`: it is being captured into a graph, and compile() was
  /// not called. Throws Error. With kinds Value and Type, the call is refused, by all ranks that
  /// make it.
  virtual void choose(DeviceLaunch& launch, const c10::Stream& stream, int pair, bool captured) = 0;
  /// Puts the requests on the stream, several as one group, on the communicator that prepare()
  /// made. Called after choose(), with the same arguments. Throws Error.
  virtual void issue(DeviceLaunch& launch, const c10::Stream& stream, int pair, bool captured) = 0;
  /// Sets how long ranks wait for each other from the next call on, where they have no limit of
  /// their own: communicators, and kernels that wait on the device. From any thread.
  virtual void setTimeout(Milliseconds timeout) = 0;
  /// The communicators, which can be polled and aborted without Python.
  virtual std::shared_ptr<Communicators> communicators() = 0;
  /// Releases the library's state, after the last operation.
  virtual void close() noexcept = 0;
};

}  // namespace fastcoll
