// The part of c10d::Store that the rendezvous needs. The process group adapts torch's store; the
// C++ tests have their own.
#pragma once

#include <string>

namespace fastcoll {

class KeyValueStore {
 public:
  virtual ~KeyValueStore() = default;
  /// Both throw Error(Network) when the store cannot be reached.
  virtual void set(const std::string& key, const std::string& value) = 0;
  /// Returns false while the key does not exist. Does not wait.
  virtual bool tryGet(const std::string& key, std::string& value) = 0;
  /// Whether the key exists. Use it for a key that may be erased meanwhile.
  virtual bool has(const std::string& key) {
    std::string value;
    return tryGet(key, value);
  }
  /// Sets the key unless it exists; returns the value that it then holds. A store that cannot do
  /// both in one step may return a value that another process is about to replace.
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
