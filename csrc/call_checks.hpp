// Checks of tensors shared by several collectives. They throw before any data is sent.
#pragma once

#include <ATen/core/Tensor.h>

#include <string>
#include <vector>

#include "tensors.hpp"

namespace fastcoll {

/// Throws. Call it only after a check has failed, so other calls build no error text.
[[noreturn]] inline void refuse(const CallSite& site, const std::string& expected,
                                const std::string& got) {
  throw Error(ErrorKind::Value, concat(site.prefix(), "expected ", expected, ", got ", got));
}

/// Calls a lower layer, whose errors lack the call's name, and adds it to them.
template <typename Body>
auto named(const CallSite& site, Body body) -> decltype(body()) {
  try {
    return body();
  } catch (const Error& error) {
    throw Error(error.kind(), site.prefix() + error.what());
  }
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
    throw Error(
        ErrorKind::Type,
        concat(site.prefix(), "expected input and output of one dtype, got ",
               dtypeName(dtypeOf(a.scalar_type())), " and ", dtypeName(dtypeOf(b.scalar_type()))));
  }
}

/// torch's coalesced collectives take tensors of one dtype, on every backend.
inline void oneType(const CallSite& site, const std::vector<at::Tensor>& tensors) {
  for (std::size_t i = 1; i < tensors.size(); ++i) {
    if (tensors[i].scalar_type() == tensors[0].scalar_type()) continue;
    throw Error(ErrorKind::Type,
                concat(site.prefix(), "expected tensors of one dtype, got ",
                       dtypeName(dtypeOf(tensors[0].scalar_type())), " at 0 and ",
                       dtypeName(dtypeOf(tensors[i].scalar_type())), " at ", i,
                       ". Make a call for each dtype, or use fastcoll.all_reduce_coalesced."));
  }
}

}  // namespace fastcoll
