#include "cpu/digests.hpp"

#include <utility>

#include "reduce/digest.hpp"

namespace fastcoll {
namespace {

// Digests of nothing but zeros. 0 means that there is none.
constexpr std::uint64_t kZeros = 1;
// Inputs of fewer elements may be equal on all ranks by intent, as those of a metric.
constexpr std::uint64_t kGradients = 1024;

std::uint64_t digestOf(const std::vector<Message>& messages) {
  if (messages.empty()) return 0;
  std::uint64_t digest = 0;
  for (std::size_t i = 0; i < messages.size(); ++i) {
    messages[i].visitMemory([&](std::size_t offset, const std::uint8_t* data, std::size_t bytes) {
      digest += fastcoll::digestOf(offset, data, bytes) * digestKey(i);
    });
  }
  return digest == 0 ? kZeros : digest;
}

/// The digest of a call of several requests.
std::uint64_t joined(std::uint64_t all, std::uint64_t next) {
  return all == 0 ? next : all * digestKey(0) + next;
}

}  // namespace

bool GroupDigests::covers(const Request& request) const {
  if (request.collective == Collective::Barrier) return false;
  return of_ == DigestsOf::All || request.op != ReduceOp::None;
}

void GroupDigests::before(Request& request, SegmentStream* stream) {
  request.resultBefore = std::exchange(result_, 0);
  request.gradientsBefore = std::exchange(gradients_, 0);
  if (!read_.empty()) stream->announceOperands(read_, operand_);
  read_.clear();
  request.operandDigests = nullptr;
  if (!covers(request)) return;
  input_ = digestOf(request.in);
  call_.input = joined(call_.input, input_);
  if (stream != nullptr && request.op != ReduceOp::None && !request.in[0].isCast()) {
    operand_ = input_ == kZeros ? 0 : input_;
    read_.resize(stream->size());
    // A reduce_scatter reads one message of each rank's list.
    part_ = request.collective == Collective::ReduceScatter ? stream->rank() : 0;
    request.operandDigests = read_.data();
  }
  if (request.collective == Collective::AllReduce && isFloating(request.dtype) &&
      request.count >= kGradients && input_ != kZeros) {
    gradients_ = input_;
  }
}

void GroupDigests::after(const Request& request) {
  if (!covers(request)) return;
  for (std::uint64_t& digest : read_) digest *= digestKey(part_);
  const std::uint64_t output = digestOf(request.out);
  call_.output = joined(call_.output, output);
  if (request.collective == Collective::AllReduce || request.collective == Collective::AllGather) {
    result_ = output;
  } else if (request.collective == Collective::Broadcast) {
    result_ = output == 0 ? input_ : output;  // the root has an input alone
  }
}

}  // namespace fastcoll
