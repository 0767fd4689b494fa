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
  /// Whether the key exists; for one that may be erased meanwhile.
  virtual bool has(const std::string& key) {
    std::string value;
    return tryGet(key, value);
  }
  /// Sets a key that does not exist; returns what it holds then. One that cannot do both in one
  /// step may return a value that another process is about to replace.
  virtual std::string setFirst(const std::string& key, const std::string& value) {
    std::string there;
    if (tryGet(key, there)) return there;
    set(key, value);
    return value;
  }
  /// Deletes a key, if the store can.
  virtual void erase(const std::string& /*key*/) noexcept {}
};

}  // namespace fastcoll
