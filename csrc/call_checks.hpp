// Checks of a call's tensors that several collectives share. They throw before anything is sent.
#pragma once

#include <ATen/core/Tensor.h>

#include <string>
#include <vector>

#include "tensors.hpp"

namespace fastcoll {

inline void expect(bool fine, const CallSite& site, const std::string& expected,
                   const std::string& got) {
  if (!fine) {
    throw Error(ErrorKind::Value, concat(site.prefix(), "expected ", expected, ", got ", got));
  }
}

/// Calls something of a lower floor, whose errors do not say which call it was.
template <typename Body>
auto named(const CallSite& site, Body body) -> decltype(body()) {
  try {
    return body();
  } catch (const Error& error) {
    throw Error(error.kind(), site.prefix() + error.what());
  }
}

inline at::Tensor& single(const CallSite& site, std::vector<at::Tensor>& tensors) {
  expect(tensors.size() == 1, site, "one tensor", concat(tensors.size(), " tensors"));
  return tensors[0];
}

inline void sameType(const CallSite& site, const at::Tensor& a, const at::Tensor& b) {
  if (a.scalar_type() != b.scalar_type()) {
    throw Error(
        ErrorKind::Type,
        concat(site.prefix(), "expected input and output of one dtype, got ",
               dtypeName(dtypeOf(a.scalar_type())), " and ", dtypeName(dtypeOf(b.scalar_type()))));
  }
}

}  // namespace fastcoll
