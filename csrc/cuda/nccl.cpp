#include "cuda/nccl.hpp"

#include <c10/util/BFloat16.h>
#include <c10/util/Float8_e4m3fn.h>
#include <c10/util/Float8_e5m2.h>
#include <c10/util/Half.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <cstring>
#include <thread>
#include <type_traits>

#include "base/error.hpp"
#include "cuda/nccl_types.hpp"

namespace fastcoll {
namespace {

// ncclScalarResidence_t.
constexpr int kOnDevice = 0;
constexpr int kOnHost = 1;

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

// --- calls ---------------------------------------------------------------------------------------

struct NcclCalls::Prepared {
  Collective collective;
  int root;
  nccl::WireType type;
  int op = nccl::kSum;
  bool scales = false;  // by a factor
  bool inTwo = false;   // see kEndsAreWhole
  const void* in = nullptr;
  void* out = nullptr;
  std::size_t count = 0;  // of elements of `type`, for one rank where each has its own
  std::size_t itemSize = 1;
};

/// The operations made for factors. They may be destroyed as soon as the calls have returned.
class NcclCalls::Operations {
 public:
  explicit Operations(const NcclCalls& calls) : calls_(calls) {}
  ~Operations() {
    if (calls_.ended_.load(std::memory_order_acquire)) return;  // freed with the communicator
    for (const int op : made_) calls_.functions_->destroyOp(op, handle());
  }
  Operations(const Operations&) = delete;
  Operations& operator=(const Operations&) = delete;

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

 private:
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

void NcclCalls::issue(const std::vector<DeviceRequest>& requests, std::uintptr_t stream) {
  throwIfEnded();
  Operations operations(*this);
  std::vector<Prepared> all;
  all.reserve(requests.size());
  for (const DeviceRequest& request : requests) {
    const Prepared one = prepare(request, operations);
    if (!changesNothing(one)) all.push_back(one);
  }
  void* const on = reinterpret_cast<void*>(stream);
  if (all.empty()) return;
  if (all.size() == 1) return finish(call(all[0], on));
  throwIfEnded();
  const int begun = functions_->groupStart();
  if (begun != kNcclSuccess) throw Error(ErrorKind::Backend, functions_->describe(begun));
  int failed = kNcclSuccess;
  for (const Prepared& one : all) {
    const int status = call(one, on);
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

NcclCalls::Prepared NcclCalls::prepare(const DeviceRequest& request, Operations& operations) const {
  const Collective collective = request.collective;
  const bool reduces = collective == Collective::AllReduce || collective == Collective::Reduce ||
                       collective == Collective::ReduceScatter;
  const bool moves = collective == Collective::AllGather || collective == Collective::Broadcast ||
                     collective == Collective::Send || collective == Collective::Recv;
  if (!reduces && !moves) {
    throw Error(ErrorKind::Value,
                concat("expected an operation of NCCL, got ", collectiveName(collective)));
  }
  Prepared made;
  made.collective = collective;
  made.root = request.root;
  made.in = reinterpret_cast<const void*>(request.in.address);
  made.out = reinterpret_cast<void*>(request.out.address);
  if (collective == Collective::Broadcast || collective == Collective::Reduce) {
    // Pass both on all ranks: NCCL registers these buffers, and all ranks must pass the same.
    if (request.in.address == 0) made.in = made.out;
    if (request.out.address == 0) made.out = reinterpret_cast<void*>(request.in.address);
  }
  std::int64_t count = std::max(request.in.count, request.out.count);
  if (collective == Collective::AllGather) count = request.in.count;
  if (collective == Collective::ReduceScatter) count = request.out.count;
  if (reduces) {
    const auto type = nccl::computed(request.dtype);
    if (!type) {
      throw Error(ErrorKind::Type,
                  concat("expected a dtype that NCCL reduces, got torch.", dtypeName(request.dtype),
                         ". Convert the tensor to a wider dtype first."));
    }
    made.type = *type;
    made.op = nccl::numberOf(request.dtype, request.op);
    made.scales = made.op == nccl::kMadeForFactor;
    made.inTwo = ranks_ == 1 && functions_->version < kEndsAreWhole &&
                 (made.scales || made.op == nccl::kAvg);
    if (made.scales) made.op = operations.make(request, type->code);
  } else {
    made.type = nccl::moved(request.dtype);
  }
  made.count = count * made.type.parts;
  made.itemSize = elementSize(request.dtype) / made.type.parts;
  return made;
}

/// Whether the result is there already: NCCL would launch a kernel even for an average of one rank.
bool NcclCalls::changesNothing(const Prepared& one) const {
  return ranks_ == 1 && one.in == one.out && !one.scales;
}

int NcclCalls::call(const Prepared& one, void* stream) const {
  const NcclFunctions& nccl = *functions_;
  void* const comm = reinterpret_cast<void*>(communicator_);
  const int type = one.type.code;
  const auto reduction = [&](const void* in, void* out, std::size_t count) {
    if (one.collective == Collective::AllReduce) {
      return nccl.allReduce(in, out, count, type, one.op, comm, stream);
    }
    if (one.collective == Collective::Reduce) {
      return nccl.reduce(in, out, count, type, one.op, one.root, comm, stream);
    }
    return nccl.reduceScatter(in, out, count, type, one.op, comm, stream);
  };
  switch (one.collective) {
    case Collective::AllReduce:
    case Collective::Reduce:
    case Collective::ReduceScatter: {
      const std::size_t first = one.inTwo ? firstWhole(one.count, one.itemSize) : one.count;
      if (first == 0 || first == one.count) return reduction(one.in, one.out, one.count);
      const int status = reduction(one.in, one.out, first);
      if (status != kNcclSuccess) return status;
      const std::size_t at = first * one.itemSize;
      return reduction(static_cast<const char*>(one.in) + at, static_cast<char*>(one.out) + at,
                       one.count - first);
    }
    case Collective::AllGather:
      return nccl.allGather(one.in, one.out, one.count, type, comm, stream);
    case Collective::Broadcast:
      return nccl.broadcast(one.in, one.out, one.count, type, one.root, comm, stream);
    case Collective::Send:
      return nccl.send(one.in, one.count, type, one.root, comm, stream);
    default:
      return nccl.recv(one.out, one.count, type, one.root, comm, stream);
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
