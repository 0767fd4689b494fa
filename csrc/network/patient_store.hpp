// A store whose waits are many short questions. torch's TCPStore serves one call of a process at a
// time: a wait in one thread keeps all others from setting what some other process waits for, and
// no signal ends it. Gloo, which connects by waiting, is given this one.
#pragma once

#include <torch/csrc/distributed/c10d/Store.hpp>

#include <algorithm>
#include <exception>
#include <functional>
#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "../base/clock.hpp"
#include "../base/error.hpp"
#include "../base/interrupt.hpp"

namespace fastcoll {

/// A peer that has found what was set here connects to this process, and waits for that in Gloo,
/// where nothing but time ends it. So a wait that is to end here first takes back what was set; and
/// if what it waited for is there by then, sets that again, and has Gloo connect: see
/// throwIfOver(). The peer, which does the same, has either found it and sees its connection made,
/// or does not find it.
class PatientStore : public c10d::Store {
 public:
  /// Waits end after `timeout`, or by what `look` throws, which is called while they last.
  PatientStore(c10::intrusive_ptr<c10d::Store> store, std::chrono::milliseconds timeout,
               std::function<void()> look)
      : c10d::Store(timeout), store_(std::move(store)), look_(std::move(look)) {}

  /// To be called when Gloo has connected: throws what was to end a wait before.
  void throwIfOver() {
    if (over_ != nullptr) std::rethrow_exception(over_);
  }
  c10::intrusive_ptr<c10d::Store> clone() override {  // used by one thread
    return c10::intrusive_ptr<PatientStore>::reclaim_copy(this);
  }
  void set(const std::string& key, const std::vector<std::uint8_t>& value) override {
    store_->set(key, value);
    own_.emplace_back(key, value);
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
  /// Gloo's limit is that of its own connections.
  void wait(const std::vector<std::string>& keys,
            const std::chrono::milliseconds& /*timeout*/) override {
    wait(keys);
  }
  void wait(const std::vector<std::string>& keys) override {
    const auto timeout = getTimeout();
    const auto deadline = deadlineAfter(Clock::now(), timeout);
    for (int micros = 50; !store_->check(keys); micros = std::min(2 * micros, 10000)) {
      try {
        checkInterrupt();
        look_();
        if (Clock::now() >= deadline) {
          throw Error(ErrorKind::Timeout, concat("nobody set ", keys.empty() ? "" : keys[0],
                                                 " within ", timeout.count(), " ms"));
        }
      } catch (...) {
        for (const auto& [key, value] : own_) store_->deleteKey(key);
        if (!store_->check(keys)) throw;
        over_ = std::current_exception();
        for (const auto& [key, value] : own_) store_->set(key, value);
        return;
      }
      std::this_thread::sleep_for(std::chrono::microseconds(micros));
    }
  }

 private:
  c10::intrusive_ptr<c10d::Store> store_;
  const std::function<void()> look_;
  std::vector<std::pair<std::string, std::vector<std::uint8_t>>> own_;
  std::exception_ptr over_;
};

}  // namespace fastcoll
