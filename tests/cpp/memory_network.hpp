// A network between threads of one process, with the rules of csrc/network/connection.hpp. Memory
// is touched only while a transfer is in progress; the sanitizers check it.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstring>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <string>

#include "network/connection.hpp"

namespace stress {

class MemoryNetwork : public fastcoll::Network {
 public:
  /// If set: a bit flips in the next transfer of so many bytes or more.
  static inline std::atomic<std::size_t> flipIn{0};

  std::unique_ptr<fastcoll::Connection> connect(const std::string& name, bool first,
                                                fastcoll::Milliseconds timeout,
                                                const std::function<void()>& check) override {
    const auto end = fastcoll::Clock::now() + timeout;
    const std::shared_ptr<Wire> wire = wireOf(name);
    std::unique_lock<std::mutex> lock(wire->mutex);
    wire->here[first ? 0 : 1] = true;
    wire->changed.notify_all();
    const auto met = [&] { return wire->here[0] && wire->here[1]; };
    while (!wire->changed.wait_for(lock, fastcoll::Milliseconds(10), met)) {
      if (fastcoll::Clock::now() >= end) {
        throw fastcoll::ConnectionLost(fastcoll::ErrorKind::Backend, "nobody connects");
      }
      lock.unlock();
      try {
        check();
      } catch (const std::exception& error) {  // as over Gloo
        throw fastcoll::ConnectionLost(fastcoll::ErrorKind::Backend, error.what());
      }
      lock.lock();
    }
    return std::make_unique<End>(wire, first ? 0 : 1);
  }
  void stopConnecting() override {}

 private:
  struct Op {
    std::uint8_t* data;
    std::size_t bytes;
    bool done = false;
  };
  using OpRef = std::shared_ptr<Op>;
  struct Wire {
    std::mutex mutex;
    std::condition_variable changed;
    bool here[2] = {false, false};
    bool broken = false;
    // For each end, by tag.
    std::map<int, std::deque<OpRef>> sends[2], receives[2];
  };

  static std::shared_ptr<Wire> wireOf(const std::string& name) {
    static std::mutex mutex;
    static auto* wires = new std::map<std::string, std::weak_ptr<Wire>>;
    const std::lock_guard<std::mutex> lock(mutex);
    std::shared_ptr<Wire> wire = (*wires)[name].lock();
    if (wire == nullptr) (*wires)[name] = wire = std::make_shared<Wire>();
    return wire;
  }

  class Under : public fastcoll::Transfer {  // a transfer in progress
   public:
    Under(std::shared_ptr<Wire> wire, OpRef op) : wire_(std::move(wire)), op_(std::move(op)) {}
    bool wait(fastcoll::TimePoint until) override {
      std::unique_lock<std::mutex> lock(wire_->mutex);
      wire_->changed.wait_until(lock, until, [this] { return op_->done || wire_->broken; });
      if (op_->done) return true;
      if (wire_->broken) {
        throw fastcoll::ConnectionLost(fastcoll::ErrorKind::Backend, "the other end closed");
      }
      return false;
    }

   private:
    std::shared_ptr<Wire> wire_;
    OpRef op_;
  };

  class End : public fastcoll::Connection {
   public:
    End(std::shared_ptr<Wire> wire, int side) : wire_(std::move(wire)), side_(side) {}
    ~End() override {
      const std::lock_guard<std::mutex> lock(wire_->mutex);
      wire_->broken = true;
      wire_->sends[side_].clear();
      wire_->receives[side_].clear();
      wire_->changed.notify_all();
    }
    fastcoll::TransferRef send(const void* data, std::size_t bytes, int tag) override {
      return begin(wire_->sends, const_cast<void*>(data), bytes, side_, tag);
    }
    fastcoll::TransferRef receive(void* data, std::size_t bytes, int tag) override {
      return begin(wire_->receives, data, bytes, 1 - side_, tag);
    }

   private:
    using Lanes = std::map<int, std::deque<OpRef>>[2];
    fastcoll::TransferRef begin(Lanes& into, void* data, std::size_t bytes, int sender, int tag) {
      const std::lock_guard<std::mutex> lock(wire_->mutex);
      if (wire_->broken) {
        throw fastcoll::ConnectionLost(fastcoll::ErrorKind::Backend, "the other end closed");
      }
      auto op = std::make_shared<Op>(Op{static_cast<std::uint8_t*>(data), bytes});
      into[side_][tag].push_back(op);
      auto& sends = wire_->sends[sender][tag];
      auto& receives = wire_->receives[1 - sender][tag];
      while (!sends.empty() && !receives.empty()) {
        Op &from = *sends.front(), &to = *receives.front();
        if (from.bytes > to.bytes) {  // as Gloo: the process would end
          wire_->broken = true;
          break;
        }
        if (from.bytes > 0) std::memcpy(to.data, from.data, from.bytes);
        std::size_t least = flipIn;
        if (least != 0 && from.bytes >= least && flipIn.compare_exchange_strong(least, 0)) {
          to.data[from.bytes / 2] ^= 1;
        }
        from.done = to.done = true;
        sends.pop_front();
        receives.pop_front();
      }
      wire_->changed.notify_all();
      return std::make_unique<Under>(wire_, std::move(op));
    }

    std::shared_ptr<Wire> wire_;
    const int side_;
  };
};

}  // namespace stress
