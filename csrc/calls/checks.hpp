// Checks of arguments shared by several calls. They throw before any data is sent.
#pragma once

#include <ATen/core/Tensor.h>

#include <vector>

#include "torch/tensors.hpp"

namespace fastcoll {

/// Calls a lower layer, whose errors lack the call's name, and adds it to them.
template <typename Body>
auto named(const CallSite& site, Body body) -> decltype(body()) {
  try {
    return body();
  } catch (const Error& error) {
    throw Error(error.kind(), site.errorSite(), error.what());
  }
}

inline void checkRank(const CallSite& site, const char* what, std::int64_t rank) {
  if (rank < 0 || rank >= site.size) {
    refuse(site, concat("a ", what, " from 0 to ", site.size - 1), concat(rank));
  }
}

/// Returns the root as a rank.
inline int checkRoot(const CallSite& site, std::int64_t root, std::int64_t rootTensor = 0) {
  checkRank(site, "root rank", root);
  if (rootTensor != 0) {
    refuse(site, "a root tensor of 0", concat(rootTensor, ": each rank gives one tensor"));
  }
  return static_cast<int>(root);
}

inline at::Tensor& single(const CallSite& site, std::vector<at::Tensor>& tensors) {
  if (tensors.size() != 1) {
    refuse(site, "one tensor", concat(tensors.size(), " tensors"));
  }
  return tensors[0];
}

/// The only list that torch passes, with a tensor for each rank; `what` is "output tensors".
inline std::vector<at::Tensor>& onePerRank(const CallSite& site,
                                           std::vector<std::vector<at::Tensor>>& lists,
                                           const char* what) {
  if (lists.size() != 1 || lists[0].size() != static_cast<std::size_t>(site.size)) {
    refuse(site, concat(site.size, " ", what, ", one per rank"),
           lists.empty()      ? "none"
           : lists.size() > 1 ? concat(lists.size(), " lists")
                              : concat(lists[0].size()));
  }
  return lists[0];
}

inline void sameType(const CallSite& site, const at::Tensor& a, const at::Tensor& b) {
  if (a.scalar_type() != b.scalar_type()) {
    throw Error(ErrorKind::Type, site.errorSite(), "expected input and output of one dtype, got ",
                dtypeName(dtypeOf(a.scalar_type())), " and ", dtypeName(dtypeOf(b.scalar_type())));
  }
}

/// Throws unless there is a tensor and all have one dtype, as on other backends.
inline void oneType(const CallSite& site, const std::vector<at::Tensor>& tensors) {
  if (tensors.empty()) {
    refuse(site, "at least one tensor", "an empty list");
  }
  for (std::size_t i = 1; i < tensors.size(); ++i) {
    if (tensors[i].scalar_type() == tensors[0].scalar_type()) continue;
    throw Error(ErrorKind::Type, site.errorSite(), "expected tensors of one dtype, got ",
                dtypeName(dtypeOf(tensors[0].scalar_type())), " at 0 and ",
                dtypeName(dtypeOf(tensors[i].scalar_type())), " at ", i,
                ". Make a call for each dtype, or use fastcoll.all_reduce_coalesced.");
  }
}

/// Throws unless each output belongs to an input, and all inputs have one dtype.
inline void paired(const CallSite& site, const std::vector<at::Tensor>& outputs,
                   const std::vector<at::Tensor>& inputs) {
  if (outputs.size() != inputs.size() || inputs.empty()) {
    refuse(site, "as many outputs as inputs, at least one",
           concat(outputs.size(), " outputs and ", inputs.size(), " inputs"));
  }
  oneType(site, inputs);
}

/// Throws unless the tensor at `index` of a list, "output" or "input", is as long as this rank's
/// tensor on the other side. `list`: the place of that tensor among several.
inline void asLongAs(const CallSite& site, const at::Tensor& own, const char* what,
                     std::size_t index, const at::Tensor& tensor, int list = -1,
                     const char* remedy = "") {
  if (tensor.numel() == own.numel()) return;
  const char* const other = what[0] == 'o' ? "input" : "output";
  refuse(
      site,
      concat(what, " ", index, " of ", list < 0 ? concat("the ", other) : concat(other, " ", list),
             "'s ", own.numel(), " elements"),
      concat(tensor.numel(), remedy));
}

/// Throws unless a tensor has a part as long as `own` for each rank. `index`: its place in a list
/// of several.
inline void wholeOf(const CallSite& site, const at::Tensor& own, const char* what,
                    const at::Tensor& whole, int index = -1, const char* where = "") {
  if (whole.numel() == own.numel() * site.size) return;
  refuse(site,
         concat(index < 0 ? concat("an ", what) : concat(what, " ", index), " of ", site.size,
                " x ", own.numel(), " elements", where),
         concat(whole.numel(), " in sizes ", whole.sizes()));
}

}  // namespace fastcoll
