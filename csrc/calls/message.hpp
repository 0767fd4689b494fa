// A message between two ranks as a call, and calls that are kept as a plan.
#pragma once

#include <memory>
#include <vector>

#include "calls/doors.hpp"
#include "calls/group_trace.hpp"
#include "cpu/point_to_point/point_to_point.hpp"
#include "torch/work.hpp"

namespace fastcoll {

/// A message of a CPU tensor: the call, and the operation that point-to-point moves. When it is
/// done it ends its work, or keeps its fault if it has none.
class MessageCall final : public Call, public PointToPointOp {
 public:
  MessageCall(const CallSite& site, const at::Tensor& tensor, int peer, int tag);
  void complete(std::exception_ptr fault) noexcept override;

  using PointToPointOp::timeout;
  using PointToPointOp::trace;

  at::Tensor tensor;                        // until it is done
  bool repeats = false;                     // of a plan: keeps its tensor when it is done
  std::shared_ptr<MessageNumbers> numbers;  // of a receive from any rank
  c10::intrusive_ptr<WorkFastcoll> work;
  std::exception_ptr unreported;
};

/// Calls that were checked once and can be repeated.
struct Plan {
  explicit Plan(Calls of);

  /// A tensor of the calls, and where it was. A tensor that is resized leaves its memory.
  struct Place {
    at::Tensor tensor;
    const void* address;
    std::size_t bytes;
  };
  const Calls calls;
  DeviceLaunch onDevice;
  std::vector<Place> places;
};

}  // namespace fastcoll
