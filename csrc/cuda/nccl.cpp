#include "cuda/nccl.hpp"

#include <c10/util/BFloat16.h>
#include <c10/util/Float8_e4m3fn.h>
#include <c10/util/Float8_e5m2.h>
#include <c10/util/Half.h>
#include <c10/util/SmallVector.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <cstring>
#include <thread>
#include <type_traits>
#include <utility>

#include "base/error.hpp"
#include "cuda/nccl_types.hpp"

namespace fastcoll {
namespace {

// ncclScalarResidence_t.
constexpr int kOnDevice = 0;
constexpr int kOnHost = 1;

// The first NCCL with ncclCommMemStats, and its ncclStatGpuMemTotal.
constexpr int kCountsMemory = 22907;
constexpr int kAllMemory = 3;

/// A factor as an element of `dtype`.
class Scalar {
 public:
  Scalar(double value, DType dtype) {
    const auto narrow = static_cast<float>(value);
    if (dtype == DType::Float16) {
      set(c10::Half(narrow));
    } else if (dtype == DType::BFloat16) {
      set(c10::BFloat16(narrow));
    } else if (dtype == DType::Float8E4M3FN) {
      set(c10::Float8_e4m3fn(narrow));
    } else if (dtype == DType::Float8E5M2) {
      set(c10::Float8_e5m2(narrow));
    } else if (dtype == DType::Float64) {
      set(value);
    } else {
      set(narrow);
    }
  }
  void* address() { return bytes_.data(); }

 private:
  template <typename T>
  void set(T value) {
    std::memcpy(bytes_.data(), &value, sizeof(value));
  }
  alignas(8) std::array<char, 8> bytes_{};
};

// NCCL before 2.29.7 drops the last elements of AVG and PREMUL_SUM of one rank (NVIDIA/nccl#1950).
// One kernel runs over the whole message, with a block for each 16 KiB, at most 32. The blocks get
// equal parts, rounded down, and the rest is neither scaled nor copied. A message that divides
// evenly is complete, so any other one is called as two that do.
constexpr int kEndsAreWhole = 22907;
constexpr std::size_t kBlockBytes = 16 << 10;
constexpr std::size_t kMostBlocks = 32;
constexpr std::size_t kPackBytes = 16;  // parts are multiples of that

/// How much of `count` elements goes in the first call.
std::size_t firstWhole(std::size_t count, std::size_t itemSize) {
  const std::size_t ofBlock = kBlockBytes / itemSize;
  const std::size_t step =
      count < kMostBlocks * ofBlock ? ofBlock : kMostBlocks * (kPackBytes / itemSize);
  return count / step * step;
}

bool reduces(Collective collective) {
  return collective == Collective::AllReduce || collective == Collective::Reduce ||
         collective == Collective::ReduceScatter;
}

bool moves(Collective collective) {
  return collective == Collective::AllGather || collective == Collective::Broadcast ||
         collective == Collective::Send || collective == Collective::Recv;
}

/// NCCL's number of the operation; see nccl::numberOf().
int numberOf(const DeviceRequest& request) {
  if (!reduces(request.collective)) {
    if (moves(request.collective)) return nccl::kSum;
    throw Error(ErrorKind::Value,
                concat("expected an operation of NCCL, got ", collectiveName(request.collective)));
  }
  if (!nccl::computed(request.dtype)) {
    throw Error(ErrorKind::Type,
                concat("expected a dtype that NCCL reduces, got torch.", dtypeName(request.dtype),
                       ". Convert the tensor to a wider dtype first."));
  }
  return nccl::numberOf(request.dtype, request.op);
}

const char* remedyFor(int status) {
  switch (status) {
    case 1:
      return "A CUDA call failed, perhaps an earlier kernel: set CUDA_LAUNCH_BLOCKING=1 to find "
             "it.";
    case 2:
      return "A call to the system or the network failed: set NCCL_DEBUG=WARN for details.";
    case 4:
      return "Check that all ranks make the same call with valid arguments: set NCCL_DEBUG=WARN "
             "for details.";
    case 5:
      return "Check that all ranks make the same call in the same order: set NCCL_DEBUG=WARN "
             "for details.";
    case 6:
      return "Another rank, or the network to it, failed: look for the first error in the ranks' "
             "logs.";
    case 8:
      return "A rank is late: look in the ranks' logs for the one that stopped.";
    default:
      return "Set NCCL_DEBUG=WARN for details.";
  }
}

std::string versionText(int version) {
  return concat(version / 10000, ".", version / 100 % 100, ".", version % 100);
}

std::string trimmed(const char* text) {
  const std::string all = text != nullptr ? text : "";
  const auto first = all.find_first_not_of(" \t\r\n");
  if (first == std::string::npos) return "";
  return all.substr(first, all.find_last_not_of(" \t\r\n") - first + 1);
}

}  // namespace

// --- the library ---------------------------------------------------------------------------------

NcclFunctions::NcclFunctions(const std::function<std::uintptr_t(const char*)>& addressOf,
                             int version)
    : version(version) {
  const auto find = [&](auto*& function, const char* name) {
    const std::uintptr_t address = addressOf(name);
    if (address == 0) {
      throw Error(ErrorKind::Backend, concat("expected an NCCL that has ", name, ", got ",
                                             versionText(version), ". Install a newer one."));
    }
    function = reinterpret_cast<std::decay_t<decltype(function)>>(address);
  };
#define FASTCOLL_FIND(Result, name, text, arguments) find(name, text);
  FASTCOLL_NCCL_FUNCTIONS(FASTCOLL_FIND)
#undef FASTCOLL_FIND
  if (const std::uintptr_t address = version >= kCountsMemory ? addressOf("ncclCommMemStats") : 0) {
    commMemStats = reinterpret_cast<decltype(commMemStats)>(address);
  }
}

std::string NcclFunctions::describe(int status) const {
  const std::string last = trimmed(getLastError(nullptr));
  return concat("NCCL ", versionText(version), " reports ", getErrorString(status), " (status ",
                status, ")", last.empty() ? "" : ": ", last, ". ", remedyFor(status));
}

int NcclFunctions::statusOf(std::uintptr_t communicator) const {
  const std::lock_guard<std::mutex> asking(asking_);
  int status = kNcclSuccess;
  const int asked = commGetAsyncError(reinterpret_cast<void*>(communicator), &status);
  return asked == kNcclSuccess ? status : asked;
}

std::int64_t NcclFunctions::bytesOf(std::uintptr_t communicator) const {
  if (commMemStats == nullptr) return -1;
  const std::lock_guard<std::mutex> asking(asking_);  // NCCL asks for the status first
  std::uint64_t bytes = 0;
  const int status = commMemStats(reinterpret_cast<void*>(communicator), kAllMemory, &bytes);
  return status == kNcclSuccess ? static_cast<std::int64_t>(bytes) : -1;
}

// --- calls ---------------------------------------------------------------------------------------

/// NCCL's numbers of operations. Those made for factors may be destroyed as soon as the calls have
/// returned.
class NcclCalls::Operations {
 public:
  explicit Operations(const NcclCalls& calls) : calls_(calls) {}
  ~Operations() {
    if (calls_.ended_.load(std::memory_order_acquire)) return;  // freed with the communicator
    for (const int op : made_) calls_.functions_->destroyOp(op, handle());
  }
  Operations(const Operations&) = delete;
  Operations& operator=(const Operations&) = delete;

  int of(const DeviceRequest& request) {
    const int number = numberOf(request);
    return number == nccl::kMadeForFactor ? make(request, nccl::computed(request.dtype)->code)
                                          : number;
  }

 private:
  int make(const DeviceRequest& request, int type) {
    Scalar scalar(request.factor, partOf(request.dtype));
    const bool there = request.factorOnDevice != 0;
    void* const address =
        there ? reinterpret_cast<void*>(request.factorOnDevice) : scalar.address();
    int op = 0;
    const int status = calls_.functions_->createPreMulSum(&op, address, type,
                                                          there ? kOnDevice : kOnHost, handle());
    if (status != kNcclSuccess)
      throw Error(ErrorKind::Backend, calls_.functions_->describe(status));
    made_.push_back(op);
    return op;
  }
  void* handle() const { return reinterpret_cast<void*>(calls_.communicator_); }
  const NcclCalls& calls_;
  std::vector<int> made_;
};

NcclCalls::NcclCalls(std::shared_ptr<const NcclFunctions> functions, std::uintptr_t communicator,
                     int ranks, Milliseconds patience)
    : functions_(std::move(functions)),
      communicator_(communicator),
      ranks_(ranks),
      patience_(patience) {}

void NcclCalls::throwIfRefused(const std::vector<DeviceRequest>& requests) {
  for (const DeviceRequest& request : requests) numberOf(request);
}

void NcclCalls::issue(const std::vector<DeviceRequest>& requests, std::uintptr_t stream) {
  throwIfEnded();
  Operations operations(*this);
  c10::SmallVector<std::pair<const DeviceRequest*, int>, 4> calls;
  for (const DeviceRequest& request : requests) {
    const int op = operations.of(request);
    if (!changesNothing(request)) calls.emplace_back(&request, op);
  }
  void* const on = reinterpret_cast<void*>(stream);
  if (calls.empty()) return;
  if (calls.size() == 1) return finish(call(*calls[0].first, calls[0].second, on));
  throwIfEnded();
  const int begun = functions_->groupStart();
  if (begun != kNcclSuccess) throw Error(ErrorKind::Backend, functions_->describe(begun));
  int failed = kNcclSuccess;
  for (const auto& [request, op] : calls) {
    const int status = call(*request, op, on);
    if (status != kNcclSuccess && status != kNcclInProgress) {
      failed = status;
      break;
    }
  }
  if (failed == kNcclSuccess) return finish(functions_->groupEnd());
  const std::string text = functions_->describe(failed);
  functions_->groupEnd();  // which drops the group
  throwIfEnded();
  throw Error(ErrorKind::Backend, text);
}

bool NcclCalls::changesNothing(const DeviceRequest& request) const {
  if (ranks_ != 1 || (reduces(request.collective) && request.op == ReduceOp::PreMulSum)) {
    return false;
  }
  const bool rooted =
      request.collective == Collective::Broadcast || request.collective == Collective::Reduce;
  const bool hasBoth = request.in.address != 0 && request.out.address != 0;
  return request.in.address == request.out.address || (rooted && !hasBoth);
}

int NcclCalls::call(const DeviceRequest& request, int op, void* stream) const {
  const NcclFunctions& nccl = *functions_;
  void* const comm = reinterpret_cast<void*>(communicator_);
  auto in = reinterpret_cast<const char*>(request.in.address);
  auto out = reinterpret_cast<char*>(request.out.address);
  if (request.collective == Collective::Broadcast || request.collective == Collective::Reduce) {
    // Pass both on all ranks: NCCL registers these buffers, and all ranks must pass the same.
    if (in == nullptr) in = out;
    if (out == nullptr) out = const_cast<char*>(in);
  }
  const nccl::WireType type =
      reduces(request.collective) ? *nccl::computed(request.dtype) : nccl::moved(request.dtype);
  std::int64_t elements = std::max(request.in.count, request.out.count);
  if (request.collective == Collective::AllGather) elements = request.in.count;
  if (request.collective == Collective::ReduceScatter) elements = request.out.count;
  const std::size_t count = elements * type.parts;
  const auto reduction = [&](std::size_t at, std::size_t some) {
    if (request.collective == Collective::AllReduce) {
      return nccl.allReduce(in + at, out + at, some, type.code, op, comm, stream);
    }
    if (request.collective == Collective::Reduce) {
      return nccl.reduce(in + at, out + at, some, type.code, op, request.root, comm, stream);
    }
    return nccl.reduceScatter(in + at, out + at, some, type.code, op, comm, stream);
  };
  switch (request.collective) {
    case Collective::AllReduce:
    case Collective::Reduce:
    case Collective::ReduceScatter: {
      const bool inTwo = ranks_ == 1 && nccl.version < kEndsAreWhole &&
                         (request.op == ReduceOp::PreMulSum || op == nccl::kAvg);
      const std::size_t itemSize = elementSize(request.dtype) / type.parts;
      const std::size_t first = inTwo ? firstWhole(count, itemSize) : count;
      if (first == 0 || first == count) return reduction(0, count);
      const int status = reduction(0, first);
      return status != kNcclSuccess ? status : reduction(first * itemSize, count - first);
    }
    case Collective::AllGather:
      return nccl.allGather(in, out, count, type.code, comm, stream);
    case Collective::Broadcast:
      return nccl.broadcast(in, out, count, type.code, request.root, comm, stream);
    case Collective::Send:
      return nccl.send(in, count, type.code, request.root, comm, stream);
    default:
      return nccl.recv(out, count, type.code, request.root, comm, stream);
  }
}

/// Waits for a call, or a group of them, that NCCL continues after returning.
void NcclCalls::finish(int status) const {
  if (status == kNcclSuccess) return;
  auto pause = std::chrono::microseconds(100);
  const auto end = std::chrono::steady_clock::now() + patience_;
  while (status == kNcclInProgress) {
    throwIfEnded();
    status = functions_->statusOf(communicator_);
    if (status != kNcclInProgress) break;
    if (std::chrono::steady_clock::now() >= end) {
      throw Error(
          ErrorKind::Timeout,
          concat("timed out after ", patience_.count(),
                 " ms: NCCL is still running. Set NCCL_DEBUG=INFO to see what it waits for."));
    }
    std::this_thread::sleep_for(pause);
    pause = std::min(2 * pause, std::chrono::microseconds(20000));
  }
  if (status == kNcclSuccess) return;
  throwIfEnded();
  throw Error(ErrorKind::Backend, functions_->describe(status));
}

void NcclCalls::throwIfEnded() const {
  if (ended_.load(std::memory_order_acquire)) {
    throw Error(ErrorKind::Backend, concat("the group was aborted", kInitAgain));
  }
}

}  // namespace fastcoll
