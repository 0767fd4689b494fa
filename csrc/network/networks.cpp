#include "network/networks.hpp"

#include <utility>

#include "network/gloo.hpp"

namespace fastcoll {
namespace {

template <typename Kind>
std::shared_ptr<Network> make(NetworkSetup setup) {
  return std::make_shared<Kind>(std::move(setup));
}

struct Row {
  const char* name;
  std::shared_ptr<Network> (*make)(NetworkSetup);
};
constexpr Row kNetworks[] = {
    {"gloo", &make<GlooNetwork>},
};

}  // namespace

std::shared_ptr<Network> networkNamed(const std::string& name, NetworkSetup setup) {
  for (const Row& row : kNetworks) {
    if (name == row.name) return row.make(std::move(setup));
  }
  throw Error(ErrorKind::Value, "FASTCOLL_NETWORK or Options.network is '", name,
              "': expected one of ", listOf(kNetworks, [](const Row& row) { return row.name; }),
              ". Correct or unset it.");
}

}  // namespace fastcoll
