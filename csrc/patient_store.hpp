// A store whose waits are many short questions. torch's TCPStore serves one call of a process at a
// time: a wait in one thread keeps all others from setting what some other process waits for, and
// no signal ends it. Gloo, which connects by waiting, is given this one.
#pragma once

#include <torch/csrc/distributed/c10d/Store.hpp>

#include <algorithm>
#include <functional>
#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "base/clock.hpp"
#include "base/error.hpp"
#include "base/interrupt.hpp"

namespace fastcoll {

class PatientStore : public c10d::Store {
 public:
  /// `look` is called while a wait lasts. What it throws ends the wait, and what was set here is
  /// taken back, so that no peer finds it and connects.
  PatientStore(c10::intrusive_ptr<c10d::Store> store, std::function<void()> look)
      : c10d::Store(store->getTimeout()), store_(std::move(store)), look_(std::move(look)) {}

  c10::intrusive_ptr<c10d::Store> clone() override {
    return c10::make_intrusive<PatientStore>(store_->clone(), look_);
  }
  void set(const std::string& key, const std::vector<std::uint8_t>& value) override {
    store_->set(key, value);
    own_.push_back(key);
  }
  std::vector<std::uint8_t> get(const std::string& key) override {
    wait({key});
    return store_->get(key);
  }
  std::int64_t add(const std::string& key, std::int64_t value) override {
    return store_->add(key, value);
  }
  bool deleteKey(const std::string& key) override { return store_->deleteKey(key); }
  bool check(const std::vector<std::string>& keys) override { return store_->check(keys); }
  std::int64_t getNumKeys() override { return store_->getNumKeys(); }
  void wait(const std::vector<std::string>& keys) override { wait(keys, getTimeout()); }
  void wait(const std::vector<std::string>& keys,
            const std::chrono::milliseconds& timeout) override {
    const auto deadline = deadlineAfter(Clock::now(), timeout);
    for (int micros = 50; !store_->check(keys); micros = std::min(2 * micros, 10000)) {
      checkInterrupt();
      try {
        look_();
      } catch (...) {
        for (const std::string& key : own_) store_->deleteKey(key);
        throw;
      }
      if (Clock::now() >= deadline) {
        throw Error(ErrorKind::Timeout, concat("nobody set ", keys.empty() ? "" : keys[0],
                                               " within ", timeout.count(), " ms"));
      }
      std::this_thread::sleep_for(std::chrono::microseconds(micros));
    }
  }

 private:
  c10::intrusive_ptr<c10d::Store> store_;
  const std::function<void()> look_;
  std::vector<std::string> own_;
};

}  // namespace fastcoll
