// Calls of CPU tensors that were checked once and can be repeated: those of a communicator's plans.
#pragma once

#include <memory>
#include <optional>
#include <vector>

#include "calls/message_numbers.hpp"
#include "cpu/point_to_point/point_to_point.hpp"
#include "process_group.hpp"
#include "torch/tensors.hpp"
#include "torch/work.hpp"
#include "trace/trace.hpp"

namespace fastcoll {

/// One message. It completes its work when it is done, or keeps its fault if it has none.
class TensorMessage : public PointToPointOp {
 public:
  void complete(std::exception_ptr fault) noexcept override;

  std::shared_ptr<MessageNumbers> numbers;  // of receives from any rank
  std::optional<TensorTask> task;           // staging; keeps the tensor alive
  bool repeats = false;                     // keeps its task when it is done
  c10::intrusive_ptr<WorkFastcoll> work;
  std::exception_ptr unreported;

 private:
  void tellTrace(const std::exception_ptr& fault) noexcept;
};

struct ProcessGroupFastcoll::Prepared {
  /// A tensor of the call, and where it was. A tensor that is resized leaves its memory.
  struct Place {
    at::Tensor tensor;
    const void* address;
    std::size_t bytes;
  };
  struct Message {
    std::shared_ptr<TensorMessage> op;
    trace::Record draft;
  };

  void keep(const at::Tensor& tensor) {
    places.push_back({tensor, tensor.const_data_ptr(), tensor.nbytes()});
  }

  // A collective, or messages in the order in which they are posted.
  std::shared_ptr<TensorTask> task;
  Call call;
  trace::Record draft;
  std::vector<Message> messages;
  std::vector<Place> places;
};

}  // namespace fastcoll
