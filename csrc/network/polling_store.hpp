// A store that waits by polling. torch's TCPStore serves one call of a process at a time. A wait in
// one thread keeps other threads from setting what another process waits for, and no signal ends
// it. Gloo connects by waiting, so it gets this store.
#pragma once

#include <torch/csrc/distributed/c10d/Store.hpp>

#include <algorithm>
#include <exception>
#include <optional>
#include <set>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "base/clock.hpp"
#include "base/error.hpp"
#include "base/interrupt.hpp"

namespace fastcoll {

/// Once a process has found its peer's address, it connects in Gloo, where only a timeout ends its
/// wait. Both processes therefore decide in one counter of the store. A process that finds the peer
/// adds 1, and a process that ends its wait adds kEnded. The first addition decides. A process that
/// ends its wait second connects first, and then raises: see throwIfEnded(). A process that finds
/// second waits until its own timeout or fault.
template <typename Check>
class PollingStore : public c10d::Store {
 public:
  /// `decision`: the counter's key, the same in both processes of a connection. Calls `check`
  /// during a wait. A wait ends after `timeout`, or when `check` throws.
  PollingStore(c10::intrusive_ptr<c10d::Store> store, std::string decision,
               std::chrono::milliseconds timeout, Check check)
      : c10d::Store(timeout),
        store_(std::move(store)),
        decision_(std::move(decision)),
        check_(std::move(check)) {}

  /// Call when Gloo has connected: throws the exception that was to end a wait before.
  void throwIfEnded() {
    if (ended_ != nullptr) std::rethrow_exception(ended_);
  }
  c10::intrusive_ptr<c10d::Store> clone() override {  // used by one thread
    return c10::intrusive_ptr<PollingStore>::reclaim_copy(this);
  }
  void set(const std::string& key, const std::vector<std::uint8_t>& value) override {
    store_->set(key, value);
    own_.insert(key);
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
  /// Ignores Gloo's limit, which is that of its own connections.
  void wait(const std::vector<std::string>& keys,
            const std::chrono::milliseconds& /*timeout*/) override {
    wait(keys);
  }
  void wait(const std::vector<std::string>& keys) override {
    const auto timeout = getTimeout();
    const auto deadline = deadlineAfter(Clock::now(), timeout);
    // Gloo also waits for keys that this process has set. They do not show that the peer has
    // arrived.
    const bool own =
        std::ranges::all_of(keys, [this](const std::string& key) { return own_.count(key) != 0; });
    for (int micros = 50; !(store_->check(keys) && (own || connects(true)));
         micros = std::min(2 * micros, 10000)) {
      try {
        checkInterrupt();
        check_();
        if (Clock::now() >= deadline) {
          throw Error(ErrorKind::Timeout, "the peer has not set the store's key ",
                      keys.empty() ? "" : keys[0], " within ", timeout.count(), " ms");
        }
      } catch (...) {
        if (!connects(false) || !store_->check(keys)) throw;
        ended_ = std::current_exception();
        return;
      }
      std::this_thread::sleep_for(std::chrono::microseconds(micros));
    }
  }

 private:
  static constexpr std::int64_t kEnded = 1 << 16;

  /// Adds to the counter, once: the peer was found, or this process ends its wait. Returns whether
  /// the two connect.
  bool connects(bool found) {
    if (!decided_) {
      const auto count = store_->add(decision_, found ? 1 : kEnded);
      decided_ = found ? count < kEnded : count % kEnded != 0;
    }
    return *decided_;
  }

  c10::intrusive_ptr<c10d::Store> store_;
  const std::string decision_;
  const Check check_;
  std::set<std::string> own_;
  std::optional<bool> decided_;
  std::exception_ptr ended_;
};

}  // namespace fastcoll
