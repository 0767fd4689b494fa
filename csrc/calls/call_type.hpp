// The calls of torch that this process group serves: what each is named in errors, in the trace and
// to torch.
#pragma once

#include <torch/csrc/distributed/c10d/Work.hpp>

#include "base/collective.hpp"

namespace fastcoll {

/// How the trace records one side's tensors. In a correct call, what is recorded must be equal on
/// all ranks. The analyser makes exceptions for scatter, gather and all_to_all.
enum class TracedAs {
  Each,      // every tensor
  Row,       // a list with an equal tensor for each rank, as one tensor with one more dimension
  Gathered,  // a row for each tensor of the other side
  Total,     // the number of all elements
  Other,     // as the other side's tensors, which all ranks have, while these differ
};

/// On which devices the stock backend counts the outputs as changed: then autograd refuses to use
/// what it saved of them. Gloo does so for outputs that it copies out of its own buffers, NCCL only
/// for all_gather's list. Scripts rely on both, call by call: on a stock backend, a script may use
/// a tensor in backward that a collective has changed.
enum class CountsChanges { Never, OnCpu, Always };

/// The place of a call in collectives.def.
enum class CallIndex : std::uint32_t {
#define CALL(id, ...) id,
#include "base/collectives.def"
};

struct CallType {
  CallIndex index;
  const char* name;  // in errors: "all_reduce"
  Collective collective;
  c10d::OpType type;
  const char* title;  // in the profiler: "fastcoll:all_reduce"
  TracedAs inputs;
  TracedAs outputs;
  CountsChanges countsChanges;
};

namespace calls {
#define CALL(id, name, collective, type, title, traced, inputs, outputs, changes) \
  inline constexpr CallType id{CallIndex::id,          name,                      \
                               Collective::collective, c10d::OpType::type,        \
                               "fastcoll:" title,      TracedAs::inputs,          \
                               TracedAs::outputs,      CountsChanges::changes};
#include "base/collectives.def"
}  // namespace calls

}  // namespace fastcoll
