// Every environment variable that fastcoll reads on the C++ side, in one class.
// fastcoll/env.py documents the same table for Python; a test keeps the two equal.
#pragma once

#include <cstddef>
#include <string>

namespace fastcoll {

enum class LogLevel { Off = 0, Warn = 1, Info = 2, Trace = 3 };
enum class TransportChoice { Auto, Shm, Gloo };
enum class StoresChoice { Auto, Plain, Streaming };

struct Environment {
  /// FASTCOLL_DEBUG=OFF|WARN|INFO|TRACE: what is written to standard error.
  /// FASTCOLL_TRANSPORT=auto|shm|gloo: auto shares memory where all ranks can, else Gloo.
  TransportChoice transport = TransportChoice::Auto;
  bool transportIsSet = false;
  /// FASTCOLL_HOST_ID: ranks with equal ones are on one host; "" asks the machine.
  std::string hostId;
  /// FASTCOLL_RING_BYTES: shared memory through which a rank's data goes (16 KiB to 1 GiB).
  std::size_t ringBytes = std::size_t{2} << 20;
  bool ringBytesIsSet = false;
  /// FASTCOLL_STORES=auto|plain|streaming: how rings are written; auto follows what it costs.
  StoresChoice stores = StoresChoice::Auto;
  /// FASTCOLL_SPIN_US: microseconds to spin before sleeping; -1 chooses by the ranks' cores.
  int spinMicros = -1;
  bool spinMicrosIsSet = false;
  /// FASTCOLL_LINK_SECONDS: of silence, after which another host counts as lost; 0: TCP's bounds.
  int linkSeconds = 10;
  bool linkSecondsIsSet = false;
  /// FASTCOLL_ERROR_HANDLING=teardown|raise: whether a fault of device tensors that nobody is told
  /// of ends the process. Unset: TORCH_NCCL_ASYNC_ERROR_HANDLING, where 0 and 2 are raise.
  bool tearsDown = true;
  /// FASTCOLL_HEARTBEAT_SECONDS: how long a watchdog of device tensors may stand still before the
  /// process is ended; 0: for ever. Unset: TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC, or 0 where
  /// TORCH_NCCL_ENABLE_MONITORING is 0.
  int heartbeatSeconds = 480;
  /// FASTCOLL_ISA=auto|avx512|avx2|baseline: instruction set of the reductions.
  std::string isa = "auto";
  /// FASTCOLL_ARENA_BYTES: address space (not memory) reserved for a process's shared arena.
  std::size_t arenaBytes = std::size_t{64} << 30;
  /// FASTCOLL_SHARED_TENSORS=0|1: whether torch allocates CPU tensors in shared memory.
  bool sharedTensors = false;
  bool sharedTensorsIsSet = false;
  /// FASTCOLL_SHARED_BUCKETS=0|1: whether DDP allocates its buckets in shared memory.
  bool sharedBuckets = true;
  bool sharedBucketsIsSet = false;
  /// FASTCOLL_TRACE_SIZE: calls that the trace of a process keeps; 0 switches it off.
  std::size_t traceSize = 2000;
  /// FASTCOLL_TRACE_STACKS=0|1: whether the trace keeps the Python stack of each call.
  bool traceStacks = false;
  /// FASTCOLL_TRACE_DUMP: prefix of the file that each rank dumps its trace to when a group fails.
  std::string traceDump;
  /// FASTCOLL_TRACE_SIGNAL=none|USR1|USR2|HUP|QUIT: the signal at which it is dumped; 0 is none.
  int traceSignal = 0;

  /// Reads the environment now. Throws Error(Value) naming the variable whose value is not allowed.
  static Environment read();
};

/// The log level alone; never throws (a bad value counts as Warn).
LogLevel logLevel();

/// Writes "[fastcoll] text" to standard error in one call if `level` is switched on.
void log(LogLevel level, const std::string& text);

}  // namespace fastcoll
