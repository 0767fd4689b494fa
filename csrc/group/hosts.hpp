// Which ranks of a group share memory: a host is such a set of ranks. Every rank of a group has all
// hosts in the same order, by their first ranks. The first rank of a host is its leader.
#pragma once

#include <cstddef>
#include <string>
#include <vector>

namespace fastcoll {

class Hosts {
 public:
  Hosts() = default;
  /// `key[rank]`: equal for ranks of one host.
  Hosts(const std::vector<std::string>& key, int rank) : of_(key.size()) {
    for (std::size_t r = 0; r < key.size(); ++r) {
      std::size_t host = 0;
      while (host < ranks_.size() && key[ranks_[host][0]] != key[r]) {
        ++host;
      }
      if (host == ranks_.size()) ranks_.emplace_back();
      of_[r] = static_cast<int>(host);
      if (static_cast<int>(r) == rank) place_ = static_cast<int>(ranks_[host].size());
      ranks_[host].push_back(static_cast<int>(r));
    }
    here_ = of_[rank];
  }

  int count() const { return static_cast<int>(ranks_.size()); }
  int size() const { return static_cast<int>(of_.size()); }
  /// This rank's host, and its place there.
  int here() const { return here_; }
  int place() const { return place_; }
  int hostOf(int rank) const { return of_[rank]; }
  /// The ranks of a host, in order.
  const std::vector<int>& ranks(int host) const { return ranks_[host]; }
  const std::vector<int>& local() const { return ranks(here_); }
  int leader(int host) const { return ranks(host)[0]; }
  bool leads() const { return place_ == 0; }
  std::size_t most() const {
    std::size_t most = 0;
    for (const auto& ranks : ranks_) most = ranks.size() > most ? ranks.size() : most;
    return most;
  }

 private:
  std::vector<std::vector<int>> ranks_;
  std::vector<int> of_;
  int here_ = 0;
  int place_ = 0;
};

}  // namespace fastcoll
