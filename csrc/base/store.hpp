// The little that the rendezvous needs of a c10d::Store; the process group adapts torch's, the C++
// tests bring one of their own.
#pragma once

#include <string>

namespace fastcoll {

class KeyValueStore {
 public:
  virtual ~KeyValueStore() = default;
  /// Both throw Error(Network) when the store cannot be reached.
  virtual void set(const std::string& key, const std::string& value) = 0;
  /// False while the key does not exist; does not wait.
  virtual bool tryGet(const std::string& key, std::string& value) = 0;
};

}  // namespace fastcoll
