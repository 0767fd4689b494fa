#include "network/networks.hpp"

#include <utility>

#include "network/gloo.hpp"

namespace fastcoll {
namespace {

template <typename Kind>
std::shared_ptr<GroupNetwork> prepare(NetworkSetup setup) {
  return std::make_shared<GroupNetwork>(
      [setup = std::move(setup)] { return std::make_shared<Kind>(setup); });
}

struct Row {
  const char* name;
  std::shared_ptr<GroupNetwork> (*prepare)(NetworkSetup);
};
constexpr Row kNetworks[] = {
    {"gloo", &prepare<GlooNetwork>},
};

}  // namespace

std::shared_ptr<GroupNetwork> groupNetwork(const std::string& name, NetworkSetup setup) {
  std::string names;
  for (const Row& row : kNetworks) {
    if (name == row.name) return row.prepare(std::move(setup));
    names += (names.empty() ? "" : ", ") + std::string(row.name);
  }
  throw Error(ErrorKind::Value, concat("FASTCOLL_NETWORK or Options.network is '", name,
                                       "': expected one of ", names, ". Correct or unset it."));
}

}  // namespace fastcoll
