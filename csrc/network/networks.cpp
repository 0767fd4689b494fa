#include "network/networks.hpp"

#include <utility>

#include "network/gloo.hpp"

namespace fastcoll {

std::shared_ptr<Network> networkNamed(const std::string& name, NetworkSetup setup) {
  if (name == "gloo") return std::make_shared<GlooNetwork>(std::move(setup));
  throw Error(ErrorKind::Value, "FASTCOLL_NETWORK or Options.network is '", name,
              "': expected one of gloo. Correct or unset it.");
}

}  // namespace fastcoll
