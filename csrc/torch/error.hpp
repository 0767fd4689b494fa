// Translates fastcoll's only exception into the class that a torch user catches.
#pragma once

#include <c10/util/Exception.h>

#include <exception>
#include <utility>

#include "base/error.hpp"

namespace fastcoll {

/// Makes c10's first error, which registers a destructor with glibc. That takes a lock, and a
/// forked child may find it locked for ever: by a thread of its parent that ran a torch operator
/// for the first time at the fork. After this, a child raises its error without the lock.
inline void makeFirstError() {
  c10::Error(c10::SourceLocation{__func__, __FILE__, static_cast<std::uint32_t>(__LINE__)}, "");
}

[[noreturn]] inline void throwAsTorch(const Error& error) {
  const c10::SourceLocation here{__func__, __FILE__, static_cast<std::uint32_t>(__LINE__)};
  switch (error.kind()) {
    case ErrorKind::Value:
      throw c10::ValueError(here, error.what());
    case ErrorKind::Type:
      throw c10::TypeError(here, error.what());
    case ErrorKind::Store:
      throw c10::DistStoreError(here, error.what());
    case ErrorKind::Network:
      throw c10::DistNetworkError(here, error.what());
    default:
      throw c10::DistBackendError(here, error.what());
  }
}

/// Calls `body` and translates what it throws.
template <typename Body>
auto translated(Body&& body) -> decltype(body()) {
  try {
    return std::forward<Body>(body)();
  } catch (const Error& error) {
    throwAsTorch(error);
  }
}

/// The same for a stored exception.
inline std::exception_ptr translatedFault(std::exception_ptr fault) {
  try {
    if (fault) translated([&] { std::rethrow_exception(fault); });
  } catch (...) {
    return std::current_exception();
  }
  return fault;
}

}  // namespace fastcoll
