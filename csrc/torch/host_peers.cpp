#include "torch/host_peers.hpp"

#include <map>
#include <mutex>
#include <set>
#include <utility>
#include <vector>

#include "base/log.hpp"
#include "base/topology.hpp"
#include "cpu/cpu_engine.hpp"
#include "shm/call_board.hpp"

namespace fastcoll {
namespace {

// A call that an ended rank has made too may still end here. And the fault of a rank that has left
// for one may still come through the store.
constexpr Milliseconds kGrace{1200};
// Between two reads of the states of processes that a call waits for.
constexpr Milliseconds kStates{500};

class PeersOfCpu final : public HostPeers {
 public:
  explicit PeersOfCpu(std::weak_ptr<CpuEngine> engine) : engine_(std::move(engine)) {}

  void meet(Milliseconds timeout) override {
    const auto engine = engine_.lock();
    if (engine == nullptr) return;
    const std::vector<int> here = engine->meet(timeout);
    if (here.size() == 1) return;
    const std::lock_guard<std::mutex> lock(mutex_);
    if (board_ == nullptr) board_ = std::make_shared<CallBoard>(*engine->memory(), here);
  }

  void meet(int peer, Milliseconds timeout) override {
    if (const auto engine = engine_.lock()) engine->meet(peer, timeout);
  }

  std::uint64_t post(const Signature& signature, std::uint64_t others) override {
    const auto engine = engine_.lock();
    const auto board = engine == nullptr ? nullptr : this->board();
    return board == nullptr ? 0 : board->post(signature, others);
  }

  bool aborted() override {
    const auto engine = engine_.lock();
    return engine != nullptr && engine->memory() != nullptr && engine->memory()->aborted();
  }

  Fault recorded() override {
    const auto engine = engine_.lock();
    const bool known = engine != nullptr && engine->memory() != nullptr;
    return known ? engine->memory()->recorded() : Fault{};
  }

  void record(const Fault& fault) override {
    const auto engine = engine_.lock();
    if (engine == nullptr || engine->memory() == nullptr) return;
    engine->memory()->abort(fault.kind, fault.text);
  }

  std::optional<HostFault> look(const UnderWay& call) override {
    const auto engine = engine_.lock();
    if (engine == nullptr || engine->memory() == nullptr) return std::nullopt;
    const GroupMemory& memory = *engine->memory();
    const auto now = Clock::now();
    const std::lock_guard<std::mutex> lock(looking_);
    for (int peer = 0; peer < memory.size(); ++peer) {
      if (peer == memory.rank() || !memory.isBound(peer)) continue;
      if (isLost(memory, peer, call, now)) {
        return HostFault{{ErrorKind::Backend, memory.causeOfSilence(peer, call.text)}};
      }
    }
    const auto board = this->board();
    if (board == nullptr) return std::nullopt;
    if (auto text = board->mismatch()) {
      return HostFault{{ErrorKind::Backend, std::move(*text)}, true};
    }
    warnOfStopped(memory, *board, call, now);
    return std::nullopt;
  }

  std::string late(std::uint64_t number) override {
    const auto engine = engine_.lock();
    const auto board = engine == nullptr ? nullptr : this->board();
    if (board == nullptr || number == 0) return "";
    const GroupMemory& memory = *engine->memory();
    std::string text;
    for (int peer = 0; peer < memory.size(); ++peer) {
      if (peer == memory.rank() || !memory.isBound(peer)) continue;
      if (board->countOf(peer) >= number) continue;
      const std::string last = board->lastOf(peer);
      const char state = memory.process(peer).state();
      text += concat(text.empty() ? "; not arrived: " : "; ", memory.memberName(peer),
                     last.empty() ? ", no call yet" : ", last call " + last, ", state ", state,
                     isStopped(state) ? " (stopped)" : "");
    }
    return text;
  }

 private:
  std::shared_ptr<CallBoard> board() const {
    const std::lock_guard<std::mutex> lock(mutex_);
    return board_;
  }

  /// Whether a rank has ended, or has left before the call.
  bool isLost(const GroupMemory& memory, int peer, const UnderWay& call, TimePoint now) {
    const bool dead = memory.isDead(peer);
    const bool left = memory.hasLeft(peer);
    if (!dead && !left) return false;
    const auto board = this->board();
    const bool without = board != nullptr && call.number > board->countOf(peer);
    const bool late = now >= seen_.try_emplace(peer, now).first->second + kGrace;
    return left ? without && late : call.text.empty() || without || late;
  }

  void warnOfStopped(const GroupMemory& memory, const CallBoard& board, const UnderWay& call,
                     TimePoint now) {
    if (call.text.empty() || now < call.since + kStates || now < states_ + kStates) return;
    states_ = now;
    for (int peer = 0; peer < memory.size(); ++peer) {
      if (peer == memory.rank() || !memory.isBound(peer)) continue;
      if (!isStopped(memory.process(peer).state())) {
        stopped_.erase(peer);
        continue;
      }
      if (!stopped_.insert(peer).second) continue;
      const std::string last = board.lastOf(peer);
      log(LogLevel::Warn, concat("group '", memory.identity().name, "', rank ", memory.rank(), "/",
                                 memory.size(), ": ", call.text, " waits while ",
                                 memory.memberName(peer), " is stopped by a signal or a debugger",
                                 last.empty() ? "" : ", its last call is " + last));
    }
  }

  const std::weak_ptr<CpuEngine> engine_;
  mutable std::mutex mutex_;
  std::shared_ptr<CallBoard> board_;  // used only while the engine lives
  std::mutex looking_;                // guards the rest
  std::map<int, TimePoint> seen_;     // when a rank was seen first that had ended
  std::set<int> stopped_;
  TimePoint states_{};
};

}  // namespace

std::shared_ptr<HostPeers> hostPeers(std::weak_ptr<CpuEngine> engine) {
  return std::make_shared<PeersOfCpu>(std::move(engine));
}

}  // namespace fastcoll
