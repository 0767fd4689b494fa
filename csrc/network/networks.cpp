#include "network/networks.hpp"

#include "network/gloo.hpp"

namespace fastcoll {
namespace {

template <typename Kind>
std::shared_ptr<Network> make(const NetworkSetup& setup) {
  return std::make_shared<Kind>(setup);
}

struct Row {
  const char* name;
  std::shared_ptr<Network> (*make)(const NetworkSetup&);
};
constexpr Row kNetworks[] = {
    {"gloo", &make<GlooNetwork>},
};

}  // namespace

std::function<std::shared_ptr<Network>()> networkMaker(const std::string& name,
                                                       NetworkSetup setup) {
  std::string names;
  for (const Row& row : kNetworks) {
    if (name == row.name) return [&row, setup = std::move(setup)] { return row.make(setup); };
    names += (names.empty() ? "" : ", ") + std::string(row.name);
  }
  throw Error(ErrorKind::Value, concat("FASTCOLL_NETWORK or Options.network is '", name,
                                       "': expected one of ", names, ". Correct or unset it."));
}

}  // namespace fastcoll
