// Adapts torch's store to the layers below. A store written in Python takes the GIL by itself.
#pragma once

#include <torch/csrc/distributed/c10d/Store.hpp>

#include <string>
#include <utility>
#include <vector>

#include "base/entry_lock.hpp"
#include "base/error.hpp"
#include "base/store.hpp"

namespace fastcoll {

class StoreAdapter : public KeyValueStore {
 public:
  explicit StoreAdapter(c10::intrusive_ptr<c10d::Store> store) : store_(std::move(store)) {}

  void set(const std::string& key, const std::string& value) override {
    attempt([&] { store_->set(key, std::vector<std::uint8_t>(value.begin(), value.end())); });
  }
  bool tryGet(const std::string& key, std::string& value) override {
    return attempt([&] {
      if (!store_->check({key})) return false;
      const auto bytes = store_->get(key);
      value.assign(bytes.begin(), bytes.end());
      return true;
    });
  }

  bool has(const std::string& key) override {
    return attempt([&] { return store_->check({key}); });
  }

  std::string setFirst(const std::string& key, const std::string& value) override {
    beforeWait();
    std::vector<std::uint8_t> there;
    try {
      const std::vector<std::uint8_t> mine(value.begin(), value.end());
      there = store_->compareSet(key, {}, mine);
    } catch (const std::exception&) {  // a store written in Python may lack compareSet
      return KeyValueStore::setFirst(key, value);
    }
    return std::string(there.begin(), there.end());
  }

  void erase(const std::string& key) noexcept override {
    beforeWait();
    try {
      store_->deleteKey(key);
    } catch (const std::exception&) {  // not every store can delete, and this one may be gone
    }
  }

 private:
  template <typename Use>
  auto attempt(Use use) -> decltype(use()) {
    beforeWait();
    try {
      return use();
    } catch (const c10::Error& error) {
      throw Error(ErrorKind::Network, "fastcoll: the rendezvous store failed: ",
                  withoutFullStop(error.what_without_backtrace()),
                  ". Keep the store's process alive until every group has been used once.");
    }
  }
  c10::intrusive_ptr<c10d::Store> store_;
};

}  // namespace fastcoll
