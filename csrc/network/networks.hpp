// The networks between hosts, by the name in Options.network. A new one is a file with its class,
// and its name in networks.cpp.
#pragma once

#include <torch/csrc/distributed/c10d/Store.hpp>

#include <memory>
#include <string>

#include "network/connection.hpp"

namespace fastcoll {

struct NetworkSetup {
  c10::intrusive_ptr<c10d::Store> store;  // through which two processes find each other
  /// Time after which a silent peer's host counts as lost; 0: the network's own bounds.
  Milliseconds silence;
};

/// A group's network of that name. Throws Error(Value) that lists the names.
std::shared_ptr<Network> networkNamed(const std::string& name, NetworkSetup setup);

}  // namespace fastcoll
